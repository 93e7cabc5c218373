"""Checks of one run by itself."""

from __future__ import annotations

from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import of_piece
from harness.parity.tiers.gradients import TensorPair


def in_run(
    run: Record,
    check: str,
    stage: Stage,
    observed: float,
    allowed: float,
    step: int,
    tensor: str | None,
    note: str = "",
) -> Finding:
    """A number that a run says against itself; a failure's note begins with the run."""
    said = f"in {run.name}{f', {note}' if note else ''}"
    return measured(check, stage, observed, allowed, step=step, tensor=tensor, note=said)


def in_piece(run: Record, check: str, stage: Stage, pair: TensorPair, whole: float, step: int) -> Finding:
    """A tensor's worst piece. Args: whole: what the whole tensor is allowed."""
    block = pair.block
    return in_run(run, check, stage, block.distance, of_piece(whole, block.size), step, pair.name, pair.where)
