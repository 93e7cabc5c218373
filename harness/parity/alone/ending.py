"""Last weights of one run against those that its last captured update left.

The captured weights and updates add up to the last weights, up to the rounding of each difference, u(main) of it.
Anything beyond happened after the last step, where no loss shows it; a run without a stream has no other witness there.
"""

from __future__ import annotations

from harness.config.roundoff import UNIT
from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers.gradients import length

FOLLOWS = "weights at the end follow"


def check(run: Record) -> list[Finding]:
    begin = _begin(run)
    if run.final is None or begin is None:
        return []
    unit = UNIT[str(run.config["dtype.main_params"])]
    found = []
    for name in run.final.tensors:
        updates = [run.updates[step] for step in range(begin, run.length + 1)]
        if name not in run.weights[begin].tensors or any(name not in each.tensors for each in updates):
            continue
        expected, moved = run.weights[begin].values(name), 0.0
        for each in updates:
            update = each.values(name)
            expected, moved = expected + update, moved + length(update)
        norm = length(expected) or 1.0
        off, allowed = length(run.final.values(name) - expected) / norm, unit * moved / norm
        note = f"in {run.name}, changed after the last update"
        found.append(measured(FOLLOWS, Stage.weights, off, allowed, step=run.length, tensor=name, note=note))
    return found


def _begin(run: Record) -> int | None:
    step = run.length
    while step in run.updates:
        if step in run.weights:
            return step
        step -= 1
    return None
