"""Stored runs sent to wandb whole, each into exactly one run, with what only a reader of two runs knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import BadRequest
from harness.config.schema import WandbMode
from harness.mirror.run import MirrorRun, settle
from harness.parity import StudyVerdict, Verdict, loss_bounds, verdict
from harness.store import status
from harness.store.errors import StoreError
from harness.store.metrics import iter_metrics
from harness.store.rundir import RunDir
from harness.store.status import JobProbe, State

MOVING = (State.queued, State.running)
DONE = {WandbMode.online: "sent", WandbMode.offline: "written"}


@dataclass(frozen=True)
class Distance:
    """An arm against its control: series by step, and the verdict on the pair."""

    series: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """`parity/loss_difference` (signed, relative to the control), `parity/loss_allowed` and `parity/loss_allowed_below`
    (what rounding explains), `parity/grad_norm_ratio`."""
    summary: Mapping[str, Any] = field(default_factory=dict)


def sync(runs: Iterable[RunDir], mode: WandbMode, jobs: JobProbe | None, tell: Callable[[str], None]) -> int:
    """Send runs one after the other; a run that trains now is its own mirror's, and one without a step has nothing.

    Args:
        runs: which.
        mode: offline writes files beside the runs; online sends them.
        jobs: asks the scheduler whether a submitted run still moves.
        tell: is given a line a run.

    Returns:
        How many were sent.

    Raises:
        StoreError: some cannot be read, or written to offline; all others were sent.
        MirrorFailed: wandb did not open a run; those before it were sent.
    """
    sent, verdicts, left_out = 0, _Verdicts(), []
    for run in runs:
        try:
            why = _held_back(run, jobs)
            if not why:
                _check_place(run, mode)
                send(run, mode, verdicts.of(run))
                sent += 1
        except StoreError as error:
            why = "left out"
            left_out.append(str(error))
        tell(f"{run.name}: {why or DONE[mode]}")
    if sent:
        settle()
    if left_out:
        raise StoreError("\n  ".join(left_out))
    return sent


def _check_place(run: RunDir, mode: WandbMode) -> None:
    """wandb would write elsewhere without a word, and what is printed next would not find it."""
    if mode is WandbMode.offline and not os.access(run.path, os.W_OK):
        raise StoreError(f"{run.path} is not writable, and what wandb keeps offline lies there; copy the store")


def send(run: RunDir, mode: WandbMode, distance: Distance) -> None:
    """Send one run from its first step to its last."""
    mirror = MirrorRun(run, mode, live=False)
    for record in iter_metrics(run.metrics):
        mirror.log(record, distance.series.get(record["step"]))
    mirror.finish(distance.summary)


def _held_back(run: RunDir, jobs: JobProbe | None) -> str:
    found = status.effective(run.path, jobs)
    if found is not None and found.state in MOVING:
        return f"left alone, it is {found.state.value}"
    return "" if next(iter_metrics(run.metrics), None) else "nothing to send, it has no step"


class _Verdicts:
    """The verdicts of each study, asked for once."""

    def __init__(self) -> None:
        self._studies: dict[Path, dict[Path, Verdict]] = {}

    def of(self, run: RunDir) -> Distance:
        """What is known of a run against its control; nothing for a control, or where its study is not judged."""
        folder = run.path.parent
        if folder not in self._studies:
            arms = judged(folder.parent, folder.name)
            self._studies[folder] = {Path(arm.arm).absolute(): arm for arm in (arms.arms if arms else ())}
        found = self._studies[folder].get(run.path)
        return Distance() if found is None else distance(found)


def judged(root: Path, study: str) -> StudyVerdict | None:
    """The study's verdict; None where there is nothing to judge yet."""
    try:
        return verdict(root, study)
    except BadRequest:
        return None


def distance(found: Verdict) -> Distance:
    """What a verdict and the two records say, step by step and in all."""
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
        "parity/margin": margin(found),
        "parity/sentence": found.sentence,
    }
    return Distance(series, {key: value for key, value in summary.items() if value is not None})


def _point(arm: Mapping[str, Any], control: Mapping[str, Any], allowed: float | str | None) -> dict[str, float]:
    point: dict[str, float] = {}
    if control["loss"]:
        point["parity/loss_difference"] = (arm["loss"] - control["loss"]) / abs(control["loss"])
    if isinstance(allowed, float):
        point |= {"parity/loss_allowed": allowed, "parity/loss_allowed_below": -allowed}
    if control["grad_norm"]:
        point["parity/grad_norm_ratio"] = arm["grad_norm"] / control["grad_norm"]
    return point


def margin(found: Verdict) -> float | None:
    """How much of what is allowed the worst check used up: 1 is the bound; None where nothing was measured."""
    return max((row.ratio for row in found.evidence if not isinstance(row.observed, str)), default=None)
