"""Stored runs sent to wandb, each into exactly one run, with the distance to its control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import BadRequest
from harness.config.schema import WandbMode
from harness.parity import Verdict, loss_bounds, verdict
from harness.parity.telling.render import farthest
from harness.store import checksums, status
from harness.store.errors import StoreError
from harness.store.metrics import iter_metrics
from harness.store.rundir import RunDir
from harness.store.status import RESTARTS, JobProbe
from harness.wandb_sync.run import WandbFailed, WandbRun, check_place, outcome, settle

LAST_STEP = 2**31 - 1
DONE = {WandbMode.online: "sent", WandbMode.offline: "written"}


@dataclass(frozen=True)
class Distance:
    series: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """`parity/loss_difference` (signed, relative to the control), `parity/loss_allowed` and `parity/loss_allowed_below`
    (bounds of rounding), `parity/grad_norm_ratio`."""
    summary: Mapping[str, Any] = field(default_factory=dict)


def sync(runs: Iterable[RunDir], mode: WandbMode, jobs: JobProbe | None, tell: Callable[[str], None]) -> int:
    """Send runs in sequence; returns their number. Running ones have their own copy, and runs without a step nothing
    to send.

    Args: mode: offline writes files beside the runs. jobs: scheduler's view of submitted runs. tell: called with a line
    a run.

    Raises `StoreError`: some are unreadable or not comparable; all others were sent. `WandbFailed`: wandb did not open
    a run; online earlier ones were sent, offline all others.
    """
    sent, verdicts = 0, Judged()
    left_out: dict[str, None] = {}  # a control that every arm's distance asks for is named once
    refused = ""
    for run in runs:
        try:
            why = _held_back(run, jobs)
            if not why:
                if mode is WandbMode.offline:
                    check_place(run.path)
                known, why = _distance(verdicts, run, left_out)
                send(run, mode, known)
                why, sent = DONE[mode] + why, sent + 1
        except StoreError as error:
            why = "left out"
            left_out[str(error)] = None
        except WandbFailed as error:
            if mode is WandbMode.online:  # a server that refuses one run, after seconds of waiting, refuses all
                raise
            why, refused = "left out", refused or f"{run.name}: {error}"
        tell(f"{run.name}: {why}")
    if sent:
        settle()
    if left_out:
        raise StoreError("\n  ".join([*left_out, *filter(None, [refused])]))
    if refused:
        raise WandbFailed(refused)
    return sent


def _distance(verdicts: Judged, run: RunDir, faults: dict[str, None]) -> tuple[Distance, str]:
    """Distance of a run, empty for a control and where its study cannot be judged; and what its line says."""
    folder = run.path.parent
    try:
        if folder not in verdicts:
            verdicts[folder] = {}  # where judging fails, it has said so once
            verdicts[folder] = judged(folder)
        found = verdicts[folder].get(run.path)
        return Distance() if found is None else distance(found), ""
    except StoreError as error:
        faults[str(error)] = None
        return Distance(), ", without its distance to the control"


def send(run: RunDir, mode: WandbMode, distance: Distance) -> None:
    """Send one run from its first step to its last.

    A partial run would replace the complete one of an earlier time. Raises `StoreError`: a file is unreadable.
    `WandbFailed`: wandb did not open the run.
    """
    outcome(run)
    wandb_run = WandbRun(run, mode, live=False)
    try:
        for record in iter_metrics(run.metrics):
            wandb_run.log(record, distance.series.get(record["step"]))
    except BaseException:  # Ctrl-C, or somebody who writes into a run that has ended
        wandb_run.abandon()
        raise
    wandb_run.finish(distance.summary)


def _held_back(run: RunDir, jobs: JobProbe | None) -> str:
    found = status.effective(run.path, jobs)
    if found is not None and found.state in RESTARTS:
        return f"left alone, it is {found.state.value}"
    checksums.demand(run.path, *checksums.TOLD)
    return "" if _last_step(run) else "nothing to send, it has no step"


def _last_step(run: RunDir) -> int:
    """Last step of a record; 0 for an empty one. Raises `StoreError`: steps that wandb would drop with a warning."""
    last = 0
    for number, record in enumerate(iter_metrics(run.metrics), start=1):
        step = record["step"]
        if not last < step <= LAST_STEP:
            raise StoreError(
                f"{run.metrics}, line {number} is step {step} after step {last}; wandb cannot keep that as it is: put"
                " the lines in order, each step once, or remove the run directory and run it again"
            )
        last = step
    return last


Judged = dict[Path, dict[Path, Verdict]]
"""Verdicts by study's folder and by arm's."""


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
        "parity/margin": margin(found),
        "parity/sentence": found.sentence,
    }
    return Distance(series, {key: value for key, value in summary.items() if value is not None})


def _point(arm: Mapping[str, Any], control: Mapping[str, Any], allowed: float | str | None) -> dict[str, float]:
    point: dict[str, float] = {}
    loss, held = arm.get("loss"), control.get("loss")
    if loss is not None and held:
        point["parity/loss_difference"] = (loss - held) / abs(held)
    if isinstance(allowed, float):
        point |= {"parity/loss_allowed": allowed, "parity/loss_allowed_below": -allowed}
    norm, held = arm.get("grad_norm"), control.get("grad_norm")
    if norm is not None and held:
        point["parity/grad_norm_ratio"] = norm / held
    return point


def margin(found: Verdict) -> float | None:
    """Share of its bound that the farthest check used (1 is the bound); None without measurements."""
    farthest_out = farthest(found.evidence)
    return None if farthest_out is None else farthest_out.ratio
