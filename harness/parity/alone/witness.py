"""Witnesses of one run: forwards used its main weights, and the step's gradient is the sum of its ranks' gradients.

Both sides of the sum see the same local gradients, so only the reduction rounds: a few parts in 1e8 in fp32. The error
is relative to the norm of the terms where that is larger than the sum's. Under numerics=exact it is absolute too:
integers have one resolution for all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.parity.outcome import OF_FORWARD, Finding, Grade, Stage, measured
from harness.parity.record import Record
from harness.parity.tensors import Recomputed
from harness.parity.tiers.arithmetic import SAFETY, SIGMAS, Arithmetic
from harness.parity.tiers.gradients import HANDFUL, TensorPair, compare_tensor, names, pool
from harness.parity.tiers.numeric import explain
from harness.store.screen import counted

TENSOR_SIGMAS = 6.0
"""Standard errors of one tensor's scale: a run has thousands of these, some of few elements, and none may be beyond."""


def check(run: Record, step: int, arithmetic: Arithmetic, factors: Sequence[tuple[float, str]]) -> list[Finding]:
    """Findings of one run's captured step against its own witnesses.

    Args: run: has a capture of the step and what was recomputed. factors: wrong factors and their causes.
    """
    recomputed = run.witnesses[step]
    capture = run.captures[step]
    both, odd = names(capture, recomputed.capture)
    pairs = [compare_tensor(name, capture, recomputed.capture) for name in both]
    pairs = [pair for pair in pairs if pair.finite and pair.control_finite]
    lost = [
        Finding(
            "T2", "witnessed tensor", Stage.reduction, Grade.bad, each.arm, each.control, step=step, tensor=each.name
        )
        for each in odd
    ]
    allowed = {pair.name: _allowed(pair, recomputed, arithmetic) for pair in pairs}
    return [
        *_weights(run, step, recomputed, len(both)),
        *lost,
        *(_distance(run, step, pair, allowed[pair.name]) for pair in pairs),
        *(_piece(run, step, pair, allowed[pair.name]) for pair in pairs),
        *_scales(run, step, pairs, allowed, arithmetic, factors),
    ]


def restored(run: Record) -> list[Finding]:
    facts = run.summary.get("restored")
    if not facts:
        return []
    wrong, step = [str(name) for name in facts["wrong"]], int(facts["step"]) + 1
    kind = "state as saved"
    if not wrong:
        return [Finding("T1", kind, Stage.checkpoint, Grade.ok, "as saved", "as saved", step=step)]
    said = f"{counted(len(wrong), 'tensor')} differ{'s' * (len(wrong) == 1)}"
    return [
        Finding("T1", kind, Stage.checkpoint, Grade.bad, said, "as saved", step=step, tensor=wrong[0], note=run.name)
    ]


def _weights(run: Record, step: int, recomputed: Recomputed, count: int) -> list[Finding]:
    """Checksums suffice, because a cast has one result."""
    kind = OF_FORWARD
    if not recomputed.wrong_weights:
        return [Finding("T1", kind, Stage.gather, Grade.ok, "as kept", "as kept", step=step, count=count)]
    return [
        Finding(
            "T1",
            kind,
            Stage.gather,
            Grade.bad,
            f"rank {wrong['rank']} {wrong['what']}",
            "as kept",
            step=step,
            tensor=str(wrong["tensor"]),
            note=run.name,
        )
        for wrong in recomputed.wrong_weights
    ]


def _allowed(pair: TensorPair, recomputed: Recomputed, arithmetic: Arithmetic) -> float:
    if pair.norm == 0.0:
        return 0.0
    rounded = arithmetic.reduction * max(1.0, recomputed.terms[pair.name] / pair.norm)
    return SAFETY * math.hypot(rounded, arithmetic.lost(pair.numel) / pair.norm)


def _distance(run: Record, step: int, pair: TensorPair, allowed: float) -> Finding:
    return _finding(run, "sum of local gradients", pair.distance, allowed, step, pair.name)


def _piece(run: Record, step: int, pair: TensorPair, allowed: float) -> Finding:
    block = pair.block
    room = math.sqrt(2) * allowed * math.sqrt(1 + SIGMAS * math.sqrt(2 / max(1, block.stop - block.start)))
    where = f"elements {block.start} to {block.stop} of {pair.numel}"
    return _finding(run, "sum, worst piece", block.distance, room, step, pair.name, where)


def scale_error(pair: TensorPair, rounding: float) -> float:
    """Standard error of a tensor's scale.

    Where few elements carry it, their residual says little, and the sum's own error counts if larger: `rounding`,
    relative to the sum's norm, by as many elements. Seen: a gain of 32 elements, 0.85 of whose norm is one element's,
    reduced in bf16 on two ranks, was off by 6.8 standard errors.
    """
    if pair.carried_by >= HANDFUL:
        return pair.standard_error
    return max(pair.standard_error, rounding / math.sqrt(pair.carried_by))


def _scales(
    run: Record,
    step: int,
    pairs: Sequence[TensorPair],
    distances: Mapping[str, float],
    arithmetic: Arithmetic,
    factors: Sequence[tuple[float, str]],
) -> list[Finding]:
    shared = arithmetic.scaling + arithmetic.stagnation
    pooled = pool(list(pairs))
    found: list[tuple[float, float, str | None]] = []
    if pairs:
        found.append((pooled.b, SIGMAS * pooled.standard_error + shared, None))
    found += [
        (pair.b, TENSOR_SIGMAS * scale_error(pair, distances[pair.name] / SAFETY) + shared, pair.name)
        for pair in pairs
        if pair.numel >= HANDFUL and pair.norm > 0
    ]
    made = []
    for b, allowed, name in found:
        why = explain(b, allowed, factors).replace("the control's", "what its ranks computed")
        made.append(_finding(run, "scale of the sum", abs(b), allowed, step, name, why))
    return made


def _finding(
    run: Record, check: str, observed: float, allowed: float, step: int, name: str | None, note: str = ""
) -> Finding:
    said = f"in {run.name}{f', {note}' if note else ''}"
    return measured(check, Stage.reduction, observed, allowed, step=step, tensor=name, note=said)
