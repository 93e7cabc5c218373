"""Forwards of step 1 in 16 bits and in fp32, module by module, bounded by the baseline's own kernels.

docs/verdicts.md ("Forwards in 16 bits, and in fp32") derives what outputs may differ by where kernels are the same, and
where they may differ. The first module beyond is named, as what comes after it differs for its sake.
"""

from __future__ import annotations

import math
from dataclasses import replace

from harness.config.roundoff import RMS, SIXTEEN_BITS, UNIT
from harness.parity.outcome import REFUTED, Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import SAFETY, SIGMAS
from harness.parity.tiers.envelope import Envelope
from harness.store.check_stream import Forward

SAME = 1e-9
"""Largest relative difference of fp64 sums of equal numbers."""

REORDERED = SAFETY * SIGMAS * RMS * UNIT["fp32"]
"""Largest fp32 difference of equal modules' outputs, whose kernels also depend on alignment."""

LOSS = 16 * UNIT["fp32"]
"""Largest difference of losses of equal logits: fp32 means over tokens and microbatches."""

OUTPUT = "output of a module"
LOGITS = "loss given the logits"


def check(arm: Record, control: Record, envelope: Envelope) -> list[list[Finding]]:
    """Findings a kind; empty if a forward was not observed, dtypes differ, or routes may."""
    left, right = arm.forward, control.forward
    dtypes = [(each.compute, each.fp8, each.casts_first) for each in (envelope.arm, envelope.control)]
    same_dtype = dtypes[0] == dtypes[1]
    if left is None or right is None or not same_dtype or left.rows != right.rows or envelope.flips:
        return []
    counted = SAFETY * math.hypot(envelope.arm.forward, envelope.control.forward)
    distances = _distances(left, right)
    if not distances:
        return []
    if left.batch != right.batch or envelope.arm.compute not in SIXTEEN_BITS:
        apart = next((name for name, off in distances.items() if off > counted), None)
        shown = distances if apart is None else {apart: distances[apart]}
        return [[_finding(name, off, counted, REFUTED * counted) for name, off in shown.items()]]
    on_cpu = {run.config.get("cluster.device") for run in (arm, control)} == {"cpu"}
    refuted = SAME if on_cpu else math.inf
    apart = next((name for name, off in distances.items() if off > SAME), None)
    if apart is not None:  # all that comes after it differs for its sake
        another_order = SAFETY * math.hypot(envelope.arm.reordered, envelope.control.reordered)
        off = distances[apart]
        found = _finding(apart, off, SAME, max(refuted, another_order))
        said = "; another order of additions may explain it" if off <= another_order else ""
        return [[replace(found, note=found.note + said)]]
    return [[_finding(name, off, SAME, refuted) for name, off in distances.items()], _loss(arm, control, refuted)]


def parts(arm: Record, control: Record) -> bool:
    """True if outputs of some module differ in step 1 beyond alignment in fp32, with microbatches of one size.

    Differences of gradients may then have arisen in the forward.
    """
    left, right = arm.forward, control.forward
    if left is None or right is None or left.rows != right.rows or left.batch != right.batch:
        return False
    return any(off > REORDERED for off in _distances(left, right).values())


def _loss(arm: Record, control: Record, refuted: float) -> list[Finding]:
    a, c = (run.series("loss")[0] for run in (arm, control))
    if a is None or c is None or not c or not math.isfinite(a + c):
        return []
    off = abs(a - c) / abs(c)
    note = "the logits are the same, and the loss is another one"
    return [measured(LOGITS, Stage.forward, off, LOSS, LOSS if refuted <= SAME else math.inf, step=1, note=note)]


def _finding(name: str, off: float, allowed: float, refuted: float) -> Finding:
    note = f"module {name or 'the model itself'}; what was looked at before it agrees"
    return measured(OUTPUT, Stage.forward, off, allowed, refuted, step=1, tensor=name or None, note=note)


def _distances(left: Forward, right: Forward) -> dict[str, float]:
    found = {}
    for name, (theirs, squares) in right.modules.items():
        ours = left.modules.get(name)
        if ours is None or len(ours[0]) != len(theirs):
            continue
        off = math.hypot(*(a - c for a, c in zip(ours[0], theirs, strict=True))) / math.sqrt(len(theirs) or 1)
        found[name] = off / math.sqrt(squares) if squares > 0 else (math.inf if off else 0.0)
    return found
