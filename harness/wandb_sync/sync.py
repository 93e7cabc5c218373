"""Stored runs sent to wandb, each into exactly one run, with the distance to its control.

Also their metrics in files that others read, TensorBoard's events and CSV, which their libraries write.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.errors import BadRequest
from harness.config.schema import WandbMode
from harness.parity import Verdict, loss_bounds, verdict
from harness.parity.telling.render import used
from harness.store import checksums, status
from harness.store.fields import synced
from harness.store.files import private_folder
from harness.store.metrics import iter_metrics, read_metrics, tail
from harness.store.rundir import RunDir
from harness.store.status import RESTARTS, JobProbe
from harness.store.wandb_run import copying, settle

FORMATS = {"tensorboard": "tensorboard", "csv": "metrics.csv"}
"""Folder or file in a run's directory, by format; one of an earlier time is replaced."""


def write(run: RunDir, kind: str) -> Path:
    """Write the record of a run so far, under the names that wandb has. Raises `StoreError`: it cannot be read."""
    rows = [
        (each["step"], {f"train/{path}": value for path, value in synced(each).items()})
        for each in read_metrics(run.metrics)
    ]
    place = run.path / FORMATS[kind]
    if kind == "csv":
        columns = dict.fromkeys(("train/step", *(name for _, values in rows for name in values)))
        with place.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [*columns])
            table.writeheader()
            table.writerows(values for _, values in rows)
        return place
    from tensorboard.summary import Writer

    shutil.rmtree(place, ignore_errors=True)
    private_folder(place)
    events = Writer(str(place))
    for step, values in rows:
        for name, value in values.items():
            events.add_scalar(name, float(value), step)
    events.close()
    return place


DONE = {WandbMode.online: "sent", WandbMode.offline: "written"}


class Distance(NamedTuple):
    series: Mapping[int, Mapping[str, float]]
    """`parity/loss_difference` (signed, relative to the control), `parity/loss_allowed` and `parity/loss_allowed_below`
    (bounds of rounding), `parity/grad_norm_ratio`."""
    summary: Mapping[str, Any]


def sync(runs: Iterable[RunDir], mode: WandbMode, jobs: JobProbe | None, tell: Callable[[str], None]) -> None:
    """Send runs in sequence. Running ones have their own copy, and runs without a step nothing to send.

    Args: mode: offline writes files beside the runs. jobs: scheduler's view of submitted runs. tell: called with a line
    a run.

    Raises `StoreError`: a run is unreadable or not comparable. `WandbFailed`: wandb did not take it. Earlier runs were
    sent.
    """
    verdicts: dict[Path, dict[Path, Verdict]] = {}
    sent = False
    try:
        for run in runs:
            why, folder = _held_back(run, jobs), run.path.parent
            if not why:
                if folder not in verdicts:
                    verdicts[folder] = judged(folder)
                found = verdicts[folder].get(run.path)
                known = Distance({}, {}) if found is None else distance(found)
                sent = True
                with copying(run, mode.value, live=False, more=known.summary) as log:
                    for record in iter_metrics(run.metrics):
                        log(record, known.series.get(record["step"]))
                why = DONE[mode]
            tell(f"{run.name}: {why}")
    finally:
        if sent:
            settle()


def _held_back(run: RunDir, jobs: JobProbe | None) -> str:
    found = status.effective(run.path, jobs)
    if found is not None and found.state in RESTARTS:
        return f"left alone, it is {found.state.value}"
    checksums.demand(run.path, *checksums.TOLD)
    return "" if tail(run.metrics) else "nothing to send, it has no step"


def judged(folder: Path) -> dict[Path, Verdict]:
    """Verdicts on a study's arms, by folder; none where it cannot be judged."""
    try:
        arms = verdict(folder.parent, folder.name).arms
    except BadRequest:
        return {}
    return {Path(arm.arm).absolute(): arm for arm in arms}


def distance(found: Verdict) -> Distance:
    """Raises `StoreError`: one of the records cannot be read."""
    allowed = {each.step: each.allowed for each in loss_bounds(Path(found.arm), Path(found.control))}
    control = {record["step"]: record for record in iter_metrics(RunDir(Path(found.control)).metrics)}
    series = {
        record["step"]: _point(record, control[record["step"]], allowed.get(record["step"]))
        for record in iter_metrics(RunDir(Path(found.arm)).metrics)
        if record["step"] in control
    }
    summary = {
        "parity/verdict": found.outcome.value,
        "parity/tier": found.tier,
        "parity/control": RunDir(Path(found.control)).name,
        "parity/margin": used(found)[0],
        "parity/sentence": found.sentence,
    }
    return Distance(series, {key: value for key, value in summary.items() if value is not None})


def _point(arm: Mapping[str, Any], control: Mapping[str, Any], allowed: float | str | None) -> dict[str, float]:
    point: dict[str, float] = {}
    if isinstance(allowed, float):
        point = {"parity/loss_allowed": allowed, "parity/loss_allowed_below": -allowed}
    if arm.get("loss") is not None and (held := control.get("loss")):
        point["parity/loss_difference"] = (arm["loss"] - held) / abs(held)
    if arm.get("grad_norm") is not None and (held := control.get("grad_norm")):
        point["parity/grad_norm_ratio"] = arm["grad_norm"] / held
    return point
