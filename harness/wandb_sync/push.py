"""Verdicts of a study as one run of wandb: a table, its dashboard, and an artifact with its report.

A repeated push replaces the earlier one: the run's id is a function of the study's name.

The dashboard is code: its charts are made anew by every push. One section shows parity of the arms, one their cost; an
arm's bound of rounding is dashed around the signed difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import refuse
from harness.config.schema import WandbMode
from harness.parity import StudyVerdict, verdict
from harness.parity.telling.render import used
from harness.store import shapes
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.labels import named
from harness.store.reading import read_json
from harness.store.rundir import RunDir
from harness.store.study import read_study
from harness.store.wandb_run import opened, outcome, settle, wandb_id

VIEW = "view.json"
MEASURES = ("step_time_s", "sent_bytes", "peak_bytes", "final_loss")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pushed:
    folder: Path
    outcome: str
    dashboard: str


def push(root: Path, study: str, mode: WandbMode, page: Callable[[StudyVerdict], str]) -> Pushed:
    """Send a study's verdicts, or offline write them under the study's folder. Args: page: makes its report as HTML.

    Raises `BadRequest`: nothing to judge; see `harness.parity.verdict`. `StoreError`: the control's configuration or
    wandb's folder is unusable. `WandbFailed`: wandb did not open the run.
    """
    import wandb

    found = verdict(root, study)
    if not found.arms:
        problem = "the study has no arm to hold against its control"
        raise refuse(f"wandb push {study}", problem, fix="add one to its file")
    asked = RunDir(Path(found.arms[0].control)).config()["wandb"]
    with opened(
        root / study,
        mode.value,
        id=summary_id(study),
        name=f"{study}: verdicts",
        group=study,
        tags=["verdict", found.outcome.value],
        notes=found.question or None,
        config={"study": read_study(root, study)},
        entity=asked["entity"],
        project=asked["project"],
    ) as run:
        rows = list(verdict_rows(found))
        run.log({VERDICTS: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])})
        counts = Counter(f"study/{arm.outcome.value}" for arm in found.arms)
        run.summary.update({"study/verdict": found.outcome.value, "study/arms": len(found.arms), **counts})
        board = dashboard(run.entity or asked["entity"] or "", asked["project"], study, _arms(found))
        name = re.sub(r"[^\w.-]", "_", f"{study}-verdict")
        artifact = wandb.Artifact(name, type="verdict", metadata={"verdict": found.outcome.value})
        texts = {"verdict.json": json.dumps(found.as_json(), indent=2), "dashboard.json": as_json(board)}
        for file, text in {**texts, "report.html": page(found)}.items():
            with artifact.new_file(file) as opened_file:
                opened_file.write(text)
        run.log_artifact(artifact)
        own = Path(run.dir).parent
        run.finish()
    settle()
    address = "" if mode is WandbMode.offline else _save(board, root / study / "wandb" / VIEW)
    return Pushed(own, found.outcome.value, address)


def summary_id(study: str) -> str:
    return wandb_id(study, f"verdict-{hashlib.sha256(study.encode()).hexdigest()[:8]}")


def _arms(found: StudyVerdict) -> dict[str, str | None]:
    ids = {path: _id(found.study, path) for arm in found.arms for path in (arm.control, arm.arm)}
    controls: dict[str, str | None] = {ids[arm.control]: None for arm in found.arms}
    return controls | {ids[arm.arm]: ids[arm.control] for arm in found.arms}


def _id(study: str, path: str) -> str:
    return wandb_id(study, RunDir(Path(path)).signature())


def verdict_rows(found: StudyVerdict) -> Iterator[Row]:
    names = named({Path(path).name for arm in found.arms for path in (arm.arm, arm.control)})
    for arm in found.arms:
        results: Row = {}
        with suppress(StoreError):
            results = outcome(RunDir(Path(arm.arm)))
        yield {
            "arm": names[Path(arm.arm).name],
            "control": names[Path(arm.control).name],
            "verdict": arm.outcome.value,
            "tier": arm.tier,
            "margin": _finite(used(arm)[0]),
            "sentence": arm.sentence,
            **{name: _finite(results.get(f"result/{name}")) for name in MEASURES},
            "id": _id(found.study, arm.arm),
        }


def _finite(value: float | None) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _save(board: Any, remembered: Path) -> str:
    known, project = read_json(remembered, shapes.VIEW) or {}, f"{board.entity}/{board.project}"
    if known.get("project") == project:
        board._internal_name, board._internal_id = known["name"], known["id"]
    board.save()
    write_json(remembered, {"name": board._internal_name, "id": board._internal_id, "project": project})
    address: str = board.url
    return address


if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


MOST_RUNS = 100
STEP = "train/step"
BAND = ("parity/loss_allowed", "parity/loss_allowed_below")
VERDICTS = "verdicts"
CURVES = (
    ("Loss", ("train/loss",), "nats a token"),
    (
        "Signed difference of the loss to the control; dashed: what rounding explains",
        ("parity/loss_difference", *BAND),
        "relative to the control",
    ),
    ("Gradient norm, ratio to the control", ("parity/grad_norm_ratio",), "1 is the control"),
)
COSTS = (
    ("Step time", ("train/step_time_s",), "seconds, rank 0"),
    ("Exposed communication", ("train/time/exposed_comm_s",), "seconds a step, rank 0"),
    ("Memory: CUDA's allocator, peak of the step", ("train/memory/allocated",), "bytes, rank 0"),
    ("Memory: resident set", ("train/memory/rss",), "bytes, rank 0"),
)
COLUMNS = ("parity/verdict", "parity/tier", "parity/margin", "result/state", "result/peak_bytes", "result/sent_bytes")


def dashboard(entity: str, project: str, study: str, arms: Mapping[str, str | None]) -> Workspace:
    """Workspace of a study; nothing is sent.

    Args: entity: owner; may be empty offline. arms: W&B's id of every run -> that of its control; None for a control.
    """
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2.interface import Layout, WeavePanelSummaryTable

    band = [f"{arm}:{name}" for arm, control in arms.items() if control is not None for name in BAND]
    parity = [_curve(each, band if set(BAND) <= set(each[1]) else []) for each in CURVES]
    parity.append(WeavePanelSummaryTable(table_name=VERDICTS, layout=Layout(w=24, h=10)))
    controls = list(dict.fromkeys(control for control in arms.values() if control is not None))
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Parity of {study}",
        sections=[
            ws.Section(name="Is it still the same run?", panels=parity, is_open=True, pinned=True),
            ws.Section(name="What did it cost?", panels=[_curve(each, []) for each in COSTS], is_open=True),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=max(1, min(MOST_RUNS, len(arms)))),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("Group") == study),
            pinned_columns=[f"summary:{each}" for each in COLUMNS],
            baseline_run=controls[0] if len(controls) == 1 else None,
        ),
    )


def _curve(chart: tuple[str, Sequence[str], str], band: Sequence[str]) -> Any:
    from wandb_workspaces.reports.v2.interface import LinePlot

    title, metrics, unit = chart
    return LinePlot(
        title=title,
        x=STEP,
        y=list(metrics),
        title_x="step",
        title_y=unit,
        max_runs_to_show=MOST_RUNS,
        line_marks=dict.fromkeys(band, "dashed") or None,
    )


def as_json(board: Workspace) -> str:
    text: str = board._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return text
