"""T1: every recorded bit of losses, norms and captured gradients; and values that are not finite.

docs/verdicts.md ("T1: bits") says which verdict a NaN, an infinity or an update left out has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import partial

from harness.parity.outcome import Finding, Grade, Stage, fact
from harness.parity.record import Record
from harness.parity.tiers.gradients import Mismatch, TensorPair

LOGGED = (("loss", Stage.forward), ("grad_norm", Stage.clipping), ("param_norm", Stage.optimizer))
"""Logged numbers in the order of a step; gradients come between the first two."""


def check(
    arm: Record,
    control: Record,
    pairs: Mapping[int, Sequence[TensorPair]],
    mismatches: Mapping[int, Sequence[Mismatch]],
) -> list[Finding]:
    """One finding a kind: `ok` if all bits agree, else `bad` at the first that do not.

    Args: pairs, mismatches: by captured step; mismatches lack a partner.
    """
    gradients = [_gradients(step, pairs[step], mismatches.get(step, ())) for step in sorted(pairs)]
    own = [pair for pair in LOGGED if pair[0] != "grad_norm" or not (arm.is_watched or control.is_watched)]
    logged = [_logged(key, stage, arm, control) for key, stage in own]  # a norm of ours is no number of their program
    kinds = [logged[0], *gradients, *logged[1:]]
    if arm.is_watched == control.is_watched:  # the two digest weights in ways of their own
        kinds.append(_weights(arm, control))
    return [kind for kind in kinds if kind.count]  # a number that was never recorded by both is no evidence


def same_float(left: float | None, right: float | None) -> bool:
    """True if two logged numbers have the same bits: 0.0 and -0.0 differ, nan is nan."""
    if left is None or right is None:
        return left is right
    return struct.pack("<d", left) == struct.pack("<d", right)


def _logged(key: str, stage: Stage, arm: Record, control: Record) -> Finding:
    compared = 0
    for number, (left, right) in enumerate(zip(arm.series(key), control.series(key), strict=True), start=1):
        if left is None or right is None:
            continue
        compared += 1
        if not same_float(left, right):
            return Finding("T1", f"{key} bits", stage, Grade.bad, repr(left), repr(right), step=number)
    return fact(f"{key} bits", stage, "equal", count=compared)


def _gradients(step: int, pairs: Sequence[TensorPair], mismatches: Sequence[Mismatch]) -> Finding:
    told = partial(fact, "gradient bits", Stage.gradient, step=step)
    if mismatches:
        odd = mismatches[0]
        return told(odd.arm, odd.control, tensor=odd.name)
    differing = [pair for pair in pairs if not pair.bits_equal]
    if not differing:
        return told("equal", count=len(pairs))
    note = f"{len(differing)} of {len(pairs)} tensors differ; this one by {differing[0].distance:.2e} of its norm"
    return told("other bits", "bits", tensor=differing[0].name, note=note)


def _weights(arm: Record, control: Record) -> Finding:
    left, right = (str(run.summary["final_weights"]) for run in (arm, control))
    grade = Grade.ok if left == right else Grade.bad
    return Finding("T1", "final weights", Stage.optimizer, grade, left[:16], right[:16], step=arm.length)


def finite_values(
    arm: Record, control: Record, pairs: Mapping[int, Sequence[TensorPair]], last_stable: float = math.inf
) -> list[Finding]:
    """Findings of non-finite values, the earliest step first.

    Args: last_stable: last step at which the control was stable (`trajectory.stable_until`).
    """
    odd: list[tuple[int, str, Stage, bool, bool, str | None]] = []
    for step in sorted(pairs):
        wrong = [pair for pair in pairs[step] if not (pair.finite and pair.control_finite)]
        wrong.sort(key=lambda pair: pair.finite == pair.control_finite)
        odd += [(step, "gradient", Stage.gradient, p.finite, p.control_finite, p.name) for p in wrong[:1]]
    for key, stage in LOGGED:
        excused = arm.skipped | control.skipped if key == "grad_norm" else frozenset()
        for step, values in enumerate(zip(arm.series(key), control.series(key), strict=True), start=1):
            fine, control_fine = (value is None or math.isfinite(value) for value in values)
            if not (fine and control_fine) and step not in excused:
                odd.append((step, key, Stage.gradient if key == "grad_norm" else stage, fine, control_fine, None))
                break
    found = [*(_odd(*each, is_late=each[0] > last_stable) for each in odd), *_left_out_once(arm, control)]
    return sorted(found, key=lambda finding: finding.step or 0)


def _odd(
    step: int, what: str, stage: Stage, fine: bool, control_fine: bool, tensor: str | None, *, is_late: bool
) -> Finding:
    note = "in one run only, after the control had left stability" if is_late else "in one run only"
    if both := not (fine or control_fine):
        note = "in both runs: nothing after it can be compared"
    grade = Grade.doubt if both or is_late else Grade.bad
    observed, allowed = ("finite" if each else "not finite" for each in (fine, control_fine))
    return Finding("T1", f"{what} is finite", stage, grade, observed, allowed, step=step, tensor=tensor, note=note)


def _left_out_once(arm: Record, control: Record) -> list[Finding]:
    step = min(arm.skipped ^ control.skipped, default=None)
    if step is None:
        return []
    said = {True: "left out", False: "made"}
    observed, allowed = (said[step in run.skipped] for run in (arm, control))
    note = "under a dynamic loss scale, in one run only: nothing after it can be compared"
    return [fact("update is made", Stage.gradient, observed, allowed, wrong=Grade.doubt, step=step, note=note)]
