"""T2 at captured steps: gradients against the envelope, the scale of each and of all, and the sizes of updates.

Three checks a tensor, because none sees every fault: its distance, its worst piece, its scale. docs/verdicts.md derives
all bounds ("T2: the envelope at step 1", "T2 on updates").
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from harness.config.roundoff import UNIT
from harness.config.update_rule import Rule
from harness.parity.outcome import AHEAD, REFUTED, Finding, Grade, Stage, fact, measured
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import of_piece
from harness.parity.tiers.divergence import DRAW, Apart
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import HANDFUL, Mismatch, Pooled, TensorPair, pool
from harness.parity.tiers.trajectory import EXPECTED_GROWTH, MOST_GROWTH, Perturbation, growth, perturbation
from harness.store.check_stream import Stream, tensor_columns

CEILING = 0.5
"""Largest allowed distance at which later captured steps, and sizes of updates, are judged."""

EXPERT = re.compile(r".*?\bexperts\.\d+\.")


def first_step(
    pairs: Sequence[TensorPair],
    mismatches: Sequence[Mismatch],
    envelope: Envelope,
    factors: Sequence[tuple[float, str]],
) -> list[list[Finding]]:
    """Findings of the gradients at step 1, a list a kind.

    Args: pairs: common tensors, all finite. mismatches: of one run only. factors: wrong factors and their causes
    (`suspects`).
    """
    note = "the two runs train different sets of parameters (tied, frozen or lost in one of them?)"
    odd = partial(fact, "tensor exists", Stage.gradient, tier="T2", step=1, note=note)
    kinds = [
        [odd(each.arm, each.control, tensor=each.name) for each in mismatches],
        [_scale(pool(list(pairs)), envelope, factors)] if pairs else [],
        [_first_distance(pair, envelope) for pair in pairs],
        [_block(pair, envelope) for pair in pairs],
        [_scale(pair, envelope, factors) for pair in pairs],
    ]
    kinds = _excused(kinds, envelope)
    return [findings for findings in kinds if findings]


def _excused(kinds: Sequence[list[Finding]], envelope: Envelope) -> list[list[Finding]]:
    """Refuted tensors of experts put in doubt where swapped routes may have moved them.

    A flip moves a token between two experts, so that n flips touch at most 2n experts; more deviations have another
    cause.
    """
    off = {name for findings in kinds for finding in findings if (name := _refuted_expert(finding))}
    if not off or len(off) > 2 * envelope.flips:
        return list(kinds)
    return [[_doubt(finding) if _refuted_expert(finding) else finding for finding in findings] for findings in kinds]


def _refuted_expert(finding: Finding) -> str | None:
    if finding.grade is not Grade.bad or isinstance(finding.observed, str):
        return None
    match = EXPERT.match(finding.tensor or "")
    return match[0] if match else None


def _doubt(finding: Finding) -> Finding:
    note = f"{finding.note}; " if finding.note else ""
    return replace(finding, grade=Grade.doubt, note=f"{note}tokens that took another route may explain it")


def later_step(
    step: int, pairs: Sequence[TensorPair], envelope: Envelope, push: Perturbation, grown: float = 0.0
) -> list[Finding]:
    """Distances at a captured step after the first, against a growing bound; empty once it is too wide.

    Args: pairs: common tensors, all finite. envelope: possible flips refute nothing. push: difference of the first
    updates. grown: bound by observed growth (`grown`); infinite after instability.
    """
    drift, worst = (push.weights * growth(rate, step) for rate in (EXPECTED_GROWTH, MOST_GROWTH))
    found = []
    for pair in pairs:
        own = envelope.tensor(pair.name, pair.numel)
        # How many routes differ by now depends on how far the weights have come apart.
        refuted = math.inf if envelope.flips else REFUTED * (own + max(worst, grown))
        if own + drift <= CEILING:
            found.append(_distance(pair.distance, own + drift, refuted, step=step, tensor=pair.name))
    return found


def resolution(pairs: Sequence[TensorPair], envelope: Envelope) -> float:
    pooled = pool(list(pairs))
    return REFUTED * envelope.global_scale(pooled.standard_error, pooled.residual)


def suspects(envelope: Envelope) -> list[tuple[float, str]]:
    n, k = envelope.arm.ranks, envelope.arm.microbatches
    known = [(0.0, "never reduced, or dropped"), (2.0, "counted twice"), (-1.0, "of the wrong sign")]
    if n > 1:
        known += [
            ((n + 1) / n, f"(N+1)/N with N = {n}, a rank's own gradient counted twice"),
            ((n - 1) / n, f"(N-1)/N with N = {n}, one rank missing"),
            (float(n), f"N = {n}, not divided by the ranks"),
            (1.0 / n, f"1/N with N = {n}, divided by the ranks twice"),
        ]
    if k > 1:
        known += [
            ((k + 1) / k, f"(k+1)/k with k = {k}, one microbatch counted twice"),
            (float(k), f"k = {k}, not divided by the microbatches"),
            (1.0 / k, f"1/k with k = {k}, divided by the microbatches twice or one of them kept"),
        ]
    if n > 1 and k > 1:
        known += [(float(n * k), f"N*k = {n * k}, never divided"), (1.0 / (n * k), f"1/(N*k) with N*k = {n * k}")]
    return known


def explain(b: float, uncertainty: float, factors: Sequence[tuple[float, str]]) -> str:
    """Factor in words, with the mistakes within its uncertainty (at least 2 %)."""
    factor = 1.0 + b
    nearest = min((value for value, _ in factors), key=lambda value: abs(value - factor))
    if abs(nearest - factor) > max(uncertainty, 0.02 * abs(nearest)):
        return f"{f'{factor:.4g}' if abs(b) > 1e-3 else f'(1 {b:+.1e})'} x the control's"
    causes = [cause for value, cause in factors if value == nearest]
    return f"{factor:.4g} x the control's: {'; or '.join(causes)}"


_distance = partial(measured, "gradient distance", Stage.gradient)


def _room(pair: TensorPair, rerouted: float) -> float:
    return 0.0 if EXPERT.match(pair.name) else rerouted


def _first_distance(pair: TensorPair, envelope: Envelope) -> Finding:
    allowed = envelope.tensor(pair.name, pair.numel)
    refuted = REFUTED * math.hypot(allowed, _room(pair, envelope.rerouted))
    return _distance(pair.distance, allowed, refuted, step=1, tensor=pair.name)


def _block(pair: TensorPair, envelope: Envelope) -> Finding:
    allowed = of_piece(envelope.tensor(pair.name, pair.numel), pair.block.size)
    refuted = REFUTED * math.hypot(allowed, math.sqrt(2) * _room(pair, envelope.rerouted))
    off, stage = pair.block.distance, Stage.gradient
    return measured("gradient, worst piece", stage, off, allowed, refuted, step=1, tensor=pair.name, note=pair.where)


def _scale(of: TensorPair | Pooled, envelope: Envelope, factors: Sequence[tuple[float, str]]) -> Finding:
    if isinstance(of, Pooled):
        check, tensor, rerouted = "scale of all gradients", None, envelope.rerouted_scale
        allowed = envelope.global_scale(of.standard_error, of.residual)
    else:
        check, tensor, rerouted = "gradient scale", of.name, _room(of, envelope.rerouted_scale)
        allowed = envelope.scale(of.standard_error, of.residual)
        if of.numel < HANDFUL:
            allowed = max(allowed, envelope.tensor(of.name, of.numel))
    refuted, why = REFUTED * (allowed + rerouted), partial(explain, of.b, allowed, factors)
    return measured(check, Stage.gradient, abs(of.b), allowed, refuted, step=1, tensor=tensor, note=why)


def update_sizes(
    step: int,
    pairs: Sequence[TensorPair],
    envelope: Envelope,
    runs: tuple[Record, Record],
    gradients: Mapping[str, TensorPair],
    grown: float = 0.0,
) -> list[Finding]:
    """Size of every tensor's update at a step.

    Args: pairs: common updates, all finite. gradients: of step 1 by name; the envelope's distance if missing. grown:
    bound by observed growth; infinite where unbounded.
    """
    found = []
    for pair in pairs:
        allowed, refuted = _bounds_of_size(step, pair, envelope, runs, gradients.get(pair.name))
        if allowed > CEILING:
            continue
        ratio = pair.arm_norm / pair.norm if pair.norm else math.inf if pair.arm_norm else 1.0
        off, why = abs(ratio - 1.0), partial(_explain_size, ratio, step, allowed, runs[1])
        told = partial(measured, "update size", Stage.optimizer, step=step, tensor=pair.name, note=why)
        found.append(told(off, allowed, max(refuted, REFUTED * grown)))
    return found


def _bounds_of_size(
    step: int, pair: TensorPair, envelope: Envelope, runs: tuple[Record, Record], gradient: TensorPair | None
) -> tuple[float, float]:
    observed = gradient.distance if gradient is not None and math.isfinite(gradient.distance) else None
    push = perturbation(envelope, str(runs[1].config["optimizer.name"]), observed).weights
    unit = max(UNIT[str(run.config["dtype.main_params"])] for run in runs)
    rounding = unit * math.sqrt(pair.numel) / pair.norm if pair.norm else 0.0
    allowed = push * growth(EXPECTED_GROWTH, step + 1) + rounding
    return allowed, max(allowed, REFUTED * (push * growth(MOST_GROWTH, step + 1) + rounding))


def _explain_size(ratio: float, step: int, allowed: float, control: Record) -> str:
    said = f"{ratio:.4g} x the control's"
    rule = Rule.of(control.config)
    if rule.name in ("sgd", "muon"):
        return said
    ahead = rule.corrected(step + 1) / rule.corrected(step)
    close = abs(ratio - ahead) <= max(allowed, 0.02 * ahead)
    return f"{said}: the bias correction of step {step + 1}, {AHEAD}" if close else said


DISTANCE, LENGTH = "gradient distance, sketched", "length of a gradient"


def first_step_sketched(arm: Stream, control: Stream, found: Apart, envelope: Envelope) -> list[list[Finding]]:
    """Findings of step 1, a list a kind; in doubt at most where routes may be others."""
    unsure = envelope.flips
    off = np.where(np.isnan(found.reduced[0]), found.local[0], found.reduced[0])
    lengths = [_lengths(stream) for stream in (arm, control)]
    kinds: list[list[Finding]] = [[], []]
    for name, numel, distance in zip(found.names, found.numel, off.tolist(), strict=True):
        bound, (left, right) = envelope.tensor(name, numel), (each[name] for each in lengths)
        longer = 0.0 if left == right else abs(left - right) / right if right else math.inf
        for kind, check, observed, allowed in ((0, DISTANCE, distance, DRAW * bound), (1, LENGTH, longer, bound)):
            refuted = math.inf if unsure else REFUTED * allowed
            if not math.isnan(observed):
                kinds[kind] += [measured(check, Stage.gradient, observed, allowed, refuted, step=1, tensor=name)]
    return [kind for kind in kinds if kind]


def _lengths(stream: Stream) -> dict[str, float]:
    """Norm of each reduced gradient of step 1; not a number where it was not seen."""
    squares = stream.kept[1][0][:, tensor_columns(stream.sketches).index("reduced_squares")]
    return {each.name: math.sqrt(square) for each, square in zip(stream.tensors, squares.tolist(), strict=True)}


def blind(seen: float, needed: float, note: str) -> list[Finding]:
    """Doubt where a structural fault could hide. Args: seen: smallest refuted size. needed: that of the fault."""
    if seen <= needed:
        return []
    return [Finding("T2", "resolution", Stage.gradient, Grade.doubt, seen, needed, step=1, note=note)]
