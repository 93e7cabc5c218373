"""Place of a difference in a step, as far as known: one stage, or "between A and B".

At a captured step: forward and backward where local gradients differ, the reduction where these agree. At others only
loss and norms are known, and a wrong loss has any cause since the loss before. Stages that the runs' witnesses checked
are removed from both ends: the sum (reduction), the rule (optimizer), the logged norm (clipping), the gathered and kept
weights. Gathers are observed in forwards only: one for the backward may still be at fault. Data is compared step by
step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record

SEEN = {
    Stage.weights: ("kept",),
    Stage.gather: ("gather",),
    Stage.reduction: ("sum",),
    Stage.clipping: ("norm",),
    Stage.optimizer: ("rule",),
}

ALWAYS = (Stage.record, Stage.data, Stage.checkpoint)
"""Stages cleared by comparability itself; a checkpoint has its own witness."""


def cleared(runs: Collection[Record], step: int, wrong: Collection[tuple[int | None, Stage]]) -> set[Stage]:
    """Stages that both runs' streams found right, at a step and the one before.

    Args: wrong: step and stage of the witnesses' findings.
    """
    found = set(ALWAYS)
    for stage, columns in SEEN.items():
        seen = all(_seen(run, name, at) for run in runs for name in columns for at in {max(1, step - 1), step})
        if seen and not any(stage is each and at in (step - 1, step) for at, each in wrong):
            found.add(stage)
    return found - {Stage.gather} if any(each.gathers_twice for each in runs) else found


def _seen(run: Record, column: str, step: int) -> bool:
    import math

    if run.stream is None:
        return False
    values = run.stream.column(column)
    return step <= len(values) and not math.isnan(float(values[step - 1]))


def narrowed(finding: Finding, clear: Collection[Stage]) -> Finding:
    """Finding without cleared stages at both ends; unchanged if none would be left."""
    stages = list(finding.stages)
    left = [stage for stage in stages if stage not in clear]
    if finding.grade is Grade.ok or not left:
        return finding
    return replace(finding, stage=left[-1], since=None if len(left) == 1 else left[0])
