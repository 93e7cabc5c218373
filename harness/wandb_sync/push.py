"""Verdicts of a study as one run of wandb: tables, evidence and pictures, with an artifact of files.

A repeated push replaces the earlier one: the run's id is a function of the study's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.errors import refuse
from harness.config.schema import WandbMode
from harness.parity import StudyVerdict, study_text, verdict
from harness.store import shapes
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.labels import named
from harness.store.reading import read_json
from harness.store.rundir import RunDir
from harness.store.study import read_study
from harness.wandb_sync.dashboard import VERDICTS, as_json, dashboard
from harness.wandb_sync.run import check_place, drop_others, opened, outcome, quiet_settings, settle, wandb_id
from harness.wandb_sync.sync import margin

DPI = 150
EVIDENCE = "evidence"
FILES = "verdicts"
DASHBOARD, VIEW = "dashboard.json", "view.json"
MEASURES = ("result/step_time_s", "result/sent_bytes", "result/peak_bytes", "result/final_loss")

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pushed:
    folder: Path
    outcome: str
    pictures: int
    dashboard: str


def push(root: Path, study: str, mode: WandbMode) -> Pushed:
    """Send a study's verdicts, or offline write them under the study's folder.

    Raises `BadRequest`: nothing to judge; see `harness.parity.verdict`. `StoreError`: the control's configuration or
    wandb's folder is unusable. `WandbFailed`: wandb did not open the run.
    """
    found = verdict(root, study)
    if not found.arms:
        problem = "the study has no arm to hold against its control"
        raise refuse(f"wandb push {study}", problem, fix="add one to its file")
    check_place(root / study)
    asked = RunDir(Path(found.arms[0].control)).config()["wandb"]
    run = _open(root, found, asked, mode)
    own = Path(run.dir).parent
    try:
        board, drawn = _fill(run, root, found, asked)
    except BaseException:  # what an earlier push wrote stays, and this half goes
        run.finish(exit_code=1)
        settle()
        if mode is WandbMode.offline:
            shutil.rmtree(own, ignore_errors=True)
        raise
    run.finish()
    settle()
    if mode is WandbMode.offline:
        drop_others(root / study / "wandb", own)
    address = "" if mode is WandbMode.offline else _save(board, root / study / "wandb" / VIEW)
    return Pushed(own, found.outcome.value, drawn, address)


def _fill(run: Any, root: Path, found: StudyVerdict, asked: Row) -> tuple[Workspace, int]:
    study, entity = found.study, run.entity or asked["entity"] or ""
    board = dashboard(entity, asked["project"], study, _arms(found))
    folder = root / study / "wandb" / FILES
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    drawn = pictures(root, found, folder)
    texts = {
        "verdict.json": json.dumps(found.as_json(), indent=2),
        "verdict.txt": study_text(found) + "\n",
        "study.json": json.dumps(read_study(root, study), indent=2),
        DASHBOARD: as_json(board),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    _log(run, found, drawn)
    run.log_artifact(_artifact(found, folder))
    return board, len(drawn)


def summary_id(study: str) -> str:
    return wandb_id(study, f"verdict-{hashlib.sha256(study.encode()).hexdigest()[:8]}")


def _open(root: Path, found: StudyVerdict, asked: Mapping[str, Any], mode: WandbMode) -> Any:
    return opened(
        id=summary_id(found.study),
        name=f"{found.study}: verdicts",
        group=found.study,
        job_type="verdict",
        tags=["verdict", found.outcome.value],
        notes=found.question or None,
        config={"study": read_study(root, found.study)},
        entity=asked["entity"],
        project=asked["project"],
        mode=mode.value,
        resume="allow",
        dir=str(root / found.study),
        settings=quiet_settings(stats=False),
    )


def _arms(found: StudyVerdict) -> dict[str, str | None]:
    ids = {path: _id(found.study, path) for arm in found.arms for path in (arm.control, arm.arm)}
    controls: dict[str, str | None] = {ids[arm.control]: None for arm in found.arms}
    return controls | {ids[arm.arm]: ids[arm.control] for arm in found.arms}


def _id(study: str, path: str) -> str:
    return wandb_id(study, RunDir(Path(path)).signature())


def _log(run: Any, found: StudyVerdict, drawn: Sequence[Path]) -> None:
    import wandb

    tables = {VERDICTS: list(verdict_rows(found)), EVIDENCE: list(evidence_rows(found))}
    logged = {
        name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        for name, rows in tables.items()
        if rows
    }
    run.log({**logged, **{f"pictures/{each.stem}": wandb.Image(str(each)) for each in drawn}})
    counts = Counter(arm.outcome.value for arm in found.arms)
    known = {"study/verdict": found.outcome.value, "study/arms": len(found.arms)}
    run.summary.update({**known, **{f"study/{outcome}": count for outcome, count in counts.items()}})


def verdict_rows(found: StudyVerdict) -> Iterator[Row]:
    names = _names(found)
    for arm in found.arms:
        results: Row = {}
        with suppress(StoreError):
            results = outcome(RunDir(Path(arm.arm)))
        yield {
            "arm": names[arm.arm],
            "control": names[arm.control],
            "verdict": arm.outcome.value,
            "tier": arm.tier,
            "margin": _finite(margin(arm)),
            "sentence": arm.sentence,
            **{name.rpartition("/")[2]: _finite(results.get(name)) for name in MEASURES},
            "id": _id(found.study, arm.arm),
        }


def evidence_rows(found: StudyVerdict) -> Iterator[Row]:
    names = _names(found)
    for arm in found.arms:
        for each in arm.evidence:
            yield {
                "arm": names[arm.arm],
                "tier": each.tier,
                "check": each.check,
                "stage": each.place,
                "grade": each.grade.value,
                "step": each.step,
                "tensor": each.tensor,
                "observed": str(each.observed),
                "allowed": str(each.allowed),
                "margin": _finite(each.ratio),
                "of": each.count,
                "note": each.note,
            }


def _names(found: StudyVerdict) -> dict[str, str]:
    paths = {path for arm in found.arms for path in (arm.arm, arm.control)}
    labels = named({Path(path).name for path in paths})
    return {path: labels[Path(path).name] for path in paths}


def _finite(value: float | None) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _artifact(found: StudyVerdict, folder: Path) -> Any:
    import wandb

    name = re.sub(r"[^\w.-]", "_", f"{found.study}-verdict")
    artifact = wandb.Artifact(name, type="verdict", metadata={"verdict": found.outcome.value})
    for path in sorted(folder.iterdir()):
        artifact.add_file(str(path), name=path.name, policy="immutable")
    return artifact


def _save(board: Any, remembered: Path) -> str:
    known, project = read_json(remembered, shapes.VIEW) or {}, f"{board.entity}/{board.project}"
    if known.get("project") == project:
        board._internal_name, board._internal_id = known["name"], known["id"]
    board.save()
    write_json(remembered, {"name": board._internal_name, "id": board._internal_id, "project": project})
    address: str = board.url
    return address


def pictures(root: Path, found: StudyVerdict, folder: Path) -> list[Path]:
    """The figures of a study's report as PNG files; none where matplotlib is not installed."""
    try:
        from matplotlib import pyplot as plt

        from harness.analysis import figures, judge, plot
    except ImportError:
        return []
    drawn = []
    with plot.quietly():
        for each in figures.figures(judge.study(root, found.study, verdict=found)):
            drawn.append(folder / f"{each.title.lower().replace(' ', '_')}.png")
            each.figure.savefig(drawn[-1], dpi=DPI)
            plt.close(each.figure)
    return drawn
