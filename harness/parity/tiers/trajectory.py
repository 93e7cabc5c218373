"""T2 over the steps: drift of losses and norms of runs that began alike, and how far it may have grown.

docs/verdicts.md ("T2 over the steps") derives the bounds, and where they end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config.roundoff import RMS, UNIT
from harness.parity.outcome import REFUTED, Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tensors import Float64
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.envelope import Envelope

Int64 = NDArray[np.int64]


LOSS_CEILING = 0.01
"""Relative. Clean runs at run-to-run noise differ by 1 to 5 % at single steps."""
NORM_CEILING = 0.1


@dataclass(frozen=True)
class Perturbation:
    """Relative errors of the first step's updates, as seen by the loss and by the weights."""

    loss: float
    weights: float
    signs: bool = True
    """True if an update is a sign, as Adam's first is, which flips where a gradient is small."""
    seen: float = 0.0
    """Relative difference of the loss at step 2 that the distance of the weights after step 1 explains."""

    def given(self, gradients: Float64) -> Float64:
        """Perturbation of weights from the observed distance of gradients; at least that of rounding."""
        moved = np.minimum(1.0, 2 * np.sqrt(2 * gradients / math.pi)) if self.signs else 2 * gradients
        return np.maximum(self.weights, moved)


def perturbation(envelope: Envelope, optimizer: str, observed: float | None) -> Perturbation:
    """observed: distance of the whole gradients at step 1; None where none were captured."""
    # A later step's error even if step 1 showed none: that of the reduction. With bf16 weights, of the whole pass: one
    # unit of a main weight can flip a compute weight.
    reduced = math.hypot(_walk(envelope.arm), _walk(envelope.control))
    fresh = envelope.error if envelope.is_low_precision else reduced
    rho = max(2 * (observed or 0.0), fresh, 0.0 if observed is not None else envelope.distance)
    if optimizer == "sgd":
        return Perturbation(rho, rho, signs=False)
    drawn = ITERATED if optimizer == "muon" else 0.0
    return Perturbation((1 + 4 / math.pi) * rho + drawn**2, min(1.0, max(2 * math.sqrt(rho / math.pi), drawn)))


def _walk(run: Arithmetic) -> float:
    return run.reduction + RMS * UNIT[run.main] * math.sqrt(run.global_microbatches)


ITERATED = 0.2
"""Relative distance of two orthogonalized matrices, of which one was rounded otherwise once. Measured: 0.01 to 0.1."""

LOSS = "loss"
NORM = "gradient norm"

ROUNDED = 4 * UNIT["fp32"]
"""Largest difference of a logged number of equal runs: a mean or a root of sums in fp32."""


def check(
    arm: Record, control: Record, envelope: Envelope, push: Perturbation, last: int, last_stable: int
) -> list[list[Finding]]:
    """Findings of all steps, a list a kind: loss, gradient norm.

    Args: last: last step before any non-finite value. last_stable: last with bounded growth.
    """
    series = losses(arm, control, envelope, push, last, last_stable)
    series.append(_norms(arm, control, envelope, push, min(last, last_stable)))
    return [findings for each in series if (findings := each.findings())]


def _pairs(key: str, arm: Record, control: Record, last: int) -> tuple[Int64, Float64, Float64]:
    left, right = (np.array(run.series(key)[:last], dtype=np.float64) for run in (arm, control))
    there = [a is not None and c is not None for a, c in zip(arm.series(key), control.series(key), strict=True)]
    places = np.flatnonzero(np.array(there[:last], dtype=bool) & (np.isfinite(left) | np.isfinite(right)))
    return places + 1, left[places], right[places]


def relative(left: Float64, right: Float64) -> Float64:
    with np.errstate(divide="ignore", invalid="ignore"):
        off: Float64 = np.where(left == right, 0.0, np.abs(left - right) / np.abs(right))
    return off


def losses(
    arm: Record, control: Record, envelope: Envelope, push: Perturbation, last: int, last_stable: int
) -> list[Series]:
    """Losses of step 1, and of the later ones, which depend on the updates before. Args: as of `check`."""
    steps, left, right = _pairs("loss", arm, control, last)
    if not len(steps):
        return []
    moved = np.maximum(np.abs(right - right[0]), np.abs(np.diff(right, prepend=right[:1])))
    with np.errstate(divide="ignore", invalid="ignore"):
        levers = np.where(right != 0.0, np.maximum.accumulate(moved) / np.abs(right), 0.0)
    observed, drift = relative(left, right), np.maximum(push.loss * levers, push.seen)
    allowed = envelope.loss + np.minimum(drift * growths(EXPECTED_GROWTH, steps), LOSS_CEILING)
    most = np.maximum(drift * growths(MOST_GROWTH, steps), np.where(steps > 2, grown(observed, ROUNDED), 0.0))
    refuted = np.maximum(allowed, REFUTED * (envelope.loss + envelope.rerouted_loss + most))
    hot = steps > last_stable
    allowed, refuted = np.where(hot, max(LOSS_CEILING, envelope.loss), allowed), np.where(hot, np.inf, refuted)
    series = Series(LOSS, Stage.forward, steps, observed, allowed, refuted)
    later = replace(series, stage=Stage.optimizer, since=Stage.weights)
    return [series.at(steps == 1), later.at(steps > 1)]


def _norms(arm: Record, control: Record, envelope: Envelope, push: Perturbation, last: int) -> Series:
    steps, left, right = _pairs("grad_norm", arm, control, last)
    drift = push.weights * growths(EXPECTED_GROWTH, steps)
    observed = relative(left, right)
    most = np.maximum(push.weights * growths(MOST_GROWTH, steps), np.where(steps > 2, grown(observed, ROUNDED), 0.0))
    refuted = REFUTED * (envelope.norm + envelope.rerouted_norm + most)
    series = Series(NORM, Stage.gradient, steps, observed, envelope.norm + drift, refuted)
    return series.at(drift <= NORM_CEILING)


EXPECTED_GROWTH = 1.5
MOST_GROWTH = 3.0
UNSTABLE = 2.0
"""Ratio of a gradient norm to its past maximum that marks instability; one of SGD with momentum grew ninefold a step
then."""
CLIMB = 1.1
"""Ratio of a loss to its past minimum that marks instability, beyond the difference of batches (3 % at 256 tokens)."""
HOT_GROWTH = 25.0
"""Square of the largest growth a step (600) that clean pairs showed in hot training before loss or norm did."""
LEAD = 2
"""Steps by which differences grow before norm or loss do: they begin along the sharp direction as rounding."""


def stable_until(norms: Sequence[float | None], losses: Sequence[float | None] = ()) -> int:
    """Last step with valid bounds on growth, by a control's record.

    Args: norms, losses: by step; None where there is none.
    """
    bursts = [_first(norms, UNSTABLE, max), _first(losses, CLIMB, min)]
    first = min((step for step in bursts if step is not None), default=None)
    return len(norms) if first is None else max(1, first - LEAD)


def _first(values: Sequence[float | None], factor: float, extreme: Callable[[float, float], float]) -> int | None:
    before: float | None = None
    for step, value in enumerate(values, start=1):
        if value is None or not math.isfinite(value):
            continue
        if before is not None and value > factor * before > 0:
            return step
        before = value if before is None else extreme(before, value)
    return None


def growth(rate: float, step: int) -> float:
    """Growth at a later step of a difference made by the first update; 0 at step 1."""
    return 0.0 if step < 2 else math.exp(min(700.0, (step - 2) * math.log(rate)))


def growths(rate: float, steps: NDArray[np.int64]) -> Float64:
    exponents = np.minimum(700.0, (steps - 2) * math.log(rate))
    grown: Float64 = np.where(steps < 2, 0.0, np.exp(exponents))
    return grown


def grown(differences: Float64, floor: float, steps: NDArray[np.int64] | None = None) -> Float64:
    """Bound of each difference by the growth before it; 0 at the first.

    The largest so far, times the square of the largest factor of one step (`HOT_GROWTH` at least), for every step
    between. Args: differences: not negative; NaN counts as none. floor: rounding of one observation. steps: consecutive
    where None.
    """
    known = np.maximum(np.nan_to_num(differences, nan=0.0, posinf=0.0), floor)
    gaps = np.ones(len(known)) if steps is None else np.diff(steps, prepend=steps[:1] - 1)
    largest = np.maximum.accumulate(known)
    factors = np.ones_like(known)
    factors[1:] = (known[1:] / largest[:-1]) ** (1 / gaps[1:])
    fastest = np.maximum(HOT_GROWTH, np.maximum.accumulate(factors))
    result: Float64 = np.zeros_like(known)
    with np.errstate(over="ignore"):
        result[1:] = largest[:-1] * fastest[:-1] ** (2 * gaps[1:])
    return result


LISTED = 50


@dataclass(frozen=True)
class Series:
    """One check at many steps, and a Finding for each failed one up to `LISTED`, the worst of further ones with their
    number, and the worst of passed ones with theirs.

    steps: counted from 1. observed, allowed, refuted: one a step, as in `outcome.grade`. tensors: names, if any.
    """

    check: str
    stage: Stage
    steps: NDArray[np.int64]
    observed: Float64
    allowed: Float64
    refuted: Float64
    since: Stage | None = None
    note: str = ""
    tensors: NDArray[np.object_] | None = None

    def at(self, chosen: NDArray[np.bool_]) -> Series:
        """The chosen steps."""
        of_steps = ("steps", "observed", "allowed", "refuted", "tensors")
        held = {name: getattr(self, name) for name in of_steps}
        made: dict[str, Any] = {name: each if each is None else each[chosen] for name, each in held.items()}
        return replace(self, **made)

    def finding(self, at: int, count: int = 1) -> Finding:
        numbers, step = (float(each[at]) for each in (self.observed, self.allowed, self.refuted)), int(self.steps[at])
        tensor = None if self.tensors is None else self.tensors[at]
        return measured(
            self.check, self.stage, *numbers, step=step, tensor=tensor, note=self.note, since=self.since, count=count
        )

    def every(self) -> list[Finding]:
        return [self.finding(at) for at in range(len(self.steps))]

    def findings(self) -> list[Finding]:
        is_fine = self.observed <= self.allowed
        failed, passed = np.flatnonzero(~is_fine), np.flatnonzero(is_fine)
        found, rest = [self.finding(int(at)) for at in failed[:LISTED]], failed[LISTED:]
        if rest.size:
            bad = rest[~(self.observed[rest] <= self.refuted[rest])]
            found.append(self.finding(self._farthest(bad if bad.size else rest), int(rest.size)))
        if passed.size:
            found.append(self.finding(self._farthest(passed), int(passed.size)))
        return found

    def _farthest(self, places: NDArray[np.int64]) -> int:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self.observed[places] / self.allowed[places]
        return int(places[int(np.argmax(np.where(np.isnan(ratios), 0.0, ratios)))])


def listed(findings: Sequence[Finding]) -> int:
    return sum(finding.count for finding in findings)
