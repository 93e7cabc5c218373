"""Witnesses of one run: forwards used its main weights, and the step's gradient is the sum of its ranks' gradients.

docs/verdicts.md ("Witnesses: checks of a single run") derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from harness.parity.outcome import Finding, Stage, fact, measured
from harness.parity.record import Record
from harness.parity.tensors import Recomputed
from harness.parity.tiers.arithmetic import SAFETY, SIGMAS, Arithmetic, of_piece
from harness.parity.tiers.gradients import HANDFUL, TensorPair, compare_tensor, names, pool
from harness.parity.tiers.numeric import explain
from harness.store.screen import counted

OF_FORWARD = "weights of the forward"

TENSOR_SIGMAS = 6.0
"""Standard errors of one tensor's scale: a run has thousands of these, some of few elements, and none may be beyond."""


def in_run(
    run: Record, check: str, stage: Stage, off: float, allowed: float, step: int, tensor: str | None, note: str = ""
) -> Finding:
    """A number that a run says against itself; a failure's note begins with the run."""
    said = f"in {run.name}{f', {note}' if note else ''}"
    return measured(check, stage, off, allowed, step=step, tensor=tensor, note=said)


def in_piece(run: Record, check: str, stage: Stage, pair: TensorPair, whole: float, step: int) -> Finding:
    """A tensor's worst piece. Args: whole: what the whole tensor is allowed."""
    block = pair.block
    return in_run(run, check, stage, block.distance, of_piece(whole, block.size), step, pair.name, pair.where)


def check(run: Record, step: int, arithmetic: Arithmetic, factors: Sequence[tuple[float, str]]) -> list[Finding]:
    """Findings of one run's captured step against its own witnesses.

    Args: run: has a capture of the step and what was recomputed. factors: wrong factors and their causes.
    """
    recomputed = run.witnesses[step]
    capture = run.captures[step]
    both, odd = names(capture, recomputed.capture)
    pairs = [compare_tensor(name, capture, recomputed.capture) for name in both]
    pairs = [pair for pair in pairs if pair.finite and pair.control_finite]
    said = partial(fact, "witnessed tensor", Stage.reduction, tier="T2", step=step)
    lost = [said(each.arm, each.control, tensor=each.name) for each in odd]
    allowed = {pair.name: _allowed(pair, recomputed, arithmetic) for pair in pairs}
    return [
        *_weights(run, step, recomputed, len(both)),
        *lost,
        *(
            in_run(run, "sum of local gradients", Stage.reduction, pair.distance, allowed[pair.name], step, pair.name)
            for pair in pairs
        ),
        *(in_piece(run, "sum, worst piece", Stage.reduction, pair, allowed[pair.name], step) for pair in pairs),
        *_scales(run, step, pairs, allowed, arithmetic, factors),
    ]


def restored(run: Record) -> list[Finding]:
    facts = run.summary.get("restored")
    if not facts:
        return []
    wrong, step = [str(name) for name in facts["wrong"]], int(facts["step"]) + 1
    told = partial(fact, "state as saved", Stage.checkpoint, wanted="as saved", step=step, note=run.name)
    if not wrong:
        return [told("as saved")]
    return [told(f"{counted(len(wrong), 'tensor')} differ{'s' * (len(wrong) == 1)}", tensor=wrong[0])]


def replicas(run: Record) -> list[Finding]:
    others = run.summary.get("other_replicas")
    if others is None:
        return []
    said, wanted = "equal", "equal"
    if others:
        said, wanted = f"rank {', '.join(map(str, others))} ends with other weights", "rank 0's"
    return [fact("replicas", Stage.gather, said, wanted, step=run.length or None, note=f"in {run.name}")]


def _weights(run: Record, step: int, recomputed: Recomputed, count: int) -> list[Finding]:
    """Checksums suffice, because a cast has one result."""
    told = partial(fact, OF_FORWARD, Stage.gather, wanted="as kept", step=step, note=run.name)
    wrong = [(f"rank {each['rank']} {each['what']}", str(each["tensor"])) for each in recomputed.wrong_weights]
    return [told(said, tensor=name) for said, name in wrong] or [told("as kept", count=count)]


def _allowed(pair: TensorPair, recomputed: Recomputed, arithmetic: Arithmetic) -> float:
    if pair.norm == 0.0:
        return 0.0
    rounded = arithmetic.reduction * max(1.0, recomputed.terms[pair.name] / pair.norm)
    return SAFETY * math.hypot(rounded, arithmetic.lost(pair.numel) / pair.norm)


def scale_error(pair: TensorPair, rounding: float) -> float:
    """Standard error of a tensor's scale.

    Where few elements carry it, their residual says little, and the sum's own error counts if larger: `rounding`,
    relative to the sum's norm, by as many elements.
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
    def told(b: float, error: float, name: str | None) -> Finding:
        allowed = error + (arithmetic.scaling + arithmetic.stagnation)
        why = explain(b, allowed, factors).replace("the control's", "what its ranks computed")
        return in_run(run, "scale of the sum", Stage.reduction, abs(b), allowed, step, name, why)

    pooled, large = pool(list(pairs)), [pair for pair in pairs if pair.numel >= HANDFUL and pair.norm > 0]
    errors = [TENSOR_SIGMAS * scale_error(pair, distances[pair.name] / SAFETY) for pair in large]
    return [
        *([told(pooled.b, SIGMAS * pooled.standard_error, None)] if pairs else []),
        *(told(pair.b, error, pair.name) for pair, error in zip(large, errors, strict=True)),
    ]
