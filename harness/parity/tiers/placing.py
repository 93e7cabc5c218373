"""Where in a step a difference arose, as far as it is known: one stage, or "between A and B".

A captured step has a place for what differs: forward and backward where local gradients do, the reduction where these
agree. Of a step that was not captured only its loss and its norms are known, and a loss that is off may be so by
anything since the loss before it. What the runs' own witnesses saw to be right is taken off both ends: the sum (no
reduction), the rule (no optimizer), the logged norm (no clipping), what was gathered and kept (no gather, no weights).
What was gathered is seen of forwards: where a backward's weights are gathered again, a gather may still be at fault.
What a run was fed is held against its data, step by step.
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
"""Facts that a stream must have seen for a stage to be right."""

ALWAYS = (Stage.record, Stage.data, Stage.checkpoint)
"""Stages that two comparable runs have shown to be right before anything else is asked; a checkpoint's own witness
speaks for
itself."""


def cleared(runs: Collection[Record], step: int, wrong: Collection[tuple[int | None, Stage]]) -> set[Stage]:
    """Stages that both runs' streams saw, at a step and the one before, and found nothing wrong with.

    Args:
        runs: the two.
        step: counted from 1.
        wrong: step and stage of what their witnesses found.
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
    """The finding without the stages at both ends that are known to be right; all of them would leave none, and then
    they stay."""
    stages = list(finding.stages)
    left = [stage for stage in stages if stage not in clear]
    if finding.grade is Grade.ok or not left:
        return finding
    return replace(finding, stage=left[-1], since=None if len(left) == 1 else left[0])
