"""Verdicts of a study as one run of wandb: a table, its dashboard, and an artifact with its report.

A repeated push replaces the earlier one: the run's id is a function of the study's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from harness.wandb_sync.dashboard import VERDICTS, as_json, dashboard

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
