"""T1: every recorded bit of losses, norms, captured gradients and last weights, with the first difference of each
kind."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from harness.parity.outcome import Finding, Grade, Stage
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
    kinds = [logged[0], *gradients, *logged[1:], _weights(arm, control)]
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
    return Finding("T1", f"{key} bits", stage, Grade.ok, "equal", "equal", count=compared)


def _gradients(step: int, pairs: Sequence[TensorPair], mismatches: Sequence[Mismatch]) -> Finding:
    check = "gradient bits"
    if mismatches:
        odd = mismatches[0]
        return Finding("T1", check, Stage.gradient, Grade.bad, odd.arm, odd.control, step=step, tensor=odd.name)
    differing = [pair for pair in pairs if not pair.bits_equal]
    if not differing:
        return Finding("T1", check, Stage.gradient, Grade.ok, "equal", "equal", step=step, count=len(pairs))
    note = f"{len(differing)} of {len(pairs)} tensors differ; this one by {differing[0].distance:.2e} of its norm"
    return Finding(
        "T1", check, Stage.gradient, Grade.bad, "other bits", "bits", step=step, tensor=differing[0].name, note=note
    )


def _weights(arm: Record, control: Record) -> Finding:
    left, right = (str(run.summary["final_weights"]) for run in (arm, control))
    tensor, note = _first_weight(arm, control)
    by_two_rules = arm.is_watched != control.is_watched and arm.final is not None and control.final is not None
    if left == right or (by_two_rules and tensor is None):
        return Finding("T1", "final weights", Stage.optimizer, Grade.ok, left[:16], right[:16], step=arm.length)
    return Finding(
        "T1",
        "final weights",
        Stage.optimizer,
        Grade.bad,
        left[:16],
        right[:16],
        step=arm.length,
        tensor=tensor,
        note=note,
    )


def _first_weight(arm: Record, control: Record) -> tuple[str | None, str]:
    if arm.final is None or control.final is None:
        return None, ""
    both = arm.final.tensors.keys() & control.final.tensors.keys()
    off = [
        name
        for name in arm.final.tensors
        if name in both and arm.final.raw(name).tobytes() != control.final.raw(name).tobytes()
    ]
    return (off[0], f"{len(off)} of {len(both)} tensors differ") if off else (None, "")
