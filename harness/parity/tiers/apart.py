"""Distance of two runs at every step, tensor by tensor, from the sketches in their streams, and its jumps.

With m sketches S_j of one tensor the mean of (S_j(a) - S_j(c))^2 is the squared distance, with the error of a
chi-square of m degrees of freedom. docs/verdicts.md ("Two runs with every step checked") says what is a jump.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.parity.tensors import Float64
from harness.parity.tiers.arithmetic import SAFETY
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.trajectory import Perturbation
from harness.store.check_stream import Stream, tensor_columns

BURST = 625.0
"""Factor by which K may grow in unstable training: a difference was seen to grow 600-fold in one step."""

JUMP = 15.0
"""Largest growth of a gradient's distance, given the weights' distance. Clean pairs in stable training: at most 8
(docs/verdicts.md)."""

STRIDE = 10.0
"""Largest growth of the weights' distance over its past maximum. Clean pairs in stable training: at most 3."""

DRAW = 3.5
"""Largest overestimate of a distance by four sketches: the root of a chi-square of four degrees of freedom over four
exceeds it once in 10^9."""

WINDOW = 8

CHUNK = 256


@dataclass(frozen=True)
class Apart:
    """Relative distances of two runs at the steps with sketches of both.

    Arrays are [steps, tensors]; NaN where an engine exposes nothing.
    """

    steps: NDArray[np.int64]
    names: tuple[str, ...]
    numel: tuple[int, ...]
    weights: Float64
    local: Float64
    reduced: Float64
    moved: Float64
    """Change of the control's weights since the kept step before; NaN at the first."""
    whole: Float64
    """[steps]: of all weights after the step together."""

    @property
    def sees_gradients(self) -> bool:
        """True if step 1 is there with local gradients."""
        return bool(self.steps[0] == 1 and not np.isnan(self.local[0]).all())

    @property
    def before(self) -> Float64:
        """[steps]: distance of all weights before each kept step; 0 at step 1.

        If the step before was not kept, the distance after the step itself.
        """
        shifted = np.concatenate(([0.0], self.whole[:-1]))
        follows = np.diff(self.steps, prepend=0) == 1
        found: Float64 = np.where(follows, shifted, self.whole)
        return found


def apart(arm: Stream, control: Stream) -> Apart | None:
    """Distances of two streams; None where they have no sketch in common."""
    (left_steps, left), (right_steps, right) = arm.kept(), control.kept()
    steps, at_left, at_right = np.intersect1d(left_steps, right_steps, return_indices=True)
    places = {each.name: (place, each.shape) for place, each in enumerate(control.tensors)}
    here = [place for place, each in enumerate(arm.tensors) if places.get(each.name, (0, None))[1] == each.shape]
    there = [places[arm.tensors[place].name][0] for place in here]
    if arm.sketches != control.sketches or not len(steps) or not here:
        return None
    chunks = [slice(begin, begin + CHUNK) for begin in range(0, len(steps), CHUNK)]  # a stream may exceed memory
    parts, before = [], None
    for chunk in chunks:
        ours, theirs = left[at_left[chunk]][:, here], right[at_right[chunk]][:, there]
        parts.append(_squares(arm.sketches, ours, theirs, before))
        before = theirs[-1:]
    found = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    gradient = _largest(found["gradient"], WINDOW)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Apart(
            steps,
            tuple(arm.tensors[place].name for place in here),
            tuple(int(np.prod(arm.tensors[place].shape, dtype=np.int64)) for place in here),
            weights=np.sqrt(found["weights apart"] / found["weights"]),
            local=np.sqrt(found["local apart"] / (gradient * found["scale"])),
            reduced=np.sqrt(found["reduced apart"] / gradient),
            moved=np.sqrt(found["moved"] / found["weights"]),
            whole=np.sqrt(np.nansum(found["weights apart"], 1) / np.nansum(found["weights"], 1)),
        )


def _squares(sketches: int, arm: Float64, control: Float64, before: Float64 | None) -> dict[str, Float64]:
    """Squared distances and norms, [steps, tensors] each. Args: arm, control: [steps, tensors, columns]. before: the
    control's step before these; None at the first."""

    def columns(rows: Float64, kind: str) -> Float64:
        found: Float64 = rows[..., [names.index(f"{kind}_{number}") for number in range(sketches)]]
        return found

    def squared(left: Float64, right: Float64 | float = 0.0) -> Float64:
        with np.errstate(invalid="ignore", over="ignore"):
            found: Float64 = ((left - right) ** 2).mean(-1)
        return np.where(np.isfinite(found), found, np.nan)  # of gradients that overflowed nothing is known

    names = tensor_columns(sketches)
    after, local, sums = (columns(control, kind) for kind in ("after", "local", "reduced"))
    last = np.full_like(after[:1], np.nan) if before is None else columns(before, "after")
    reduced = control[..., names.index("reduced_squares")]
    reduced = np.where(np.isposinf(reduced), np.nan, reduced)
    return {
        "scale": _scale(squared(local), squared(sums)),
        "weights apart": squared(columns(arm, "after"), after),
        "weights": control[..., names.index("after_squares")],
        "local apart": squared(columns(arm, "local"), local),
        "reduced apart": squared(columns(arm, "reduced"), sums),
        "gradient": np.where(np.isnan(reduced), squared(local), reduced),
        "moved": squared(np.diff(after, axis=0, prepend=last)),
    }


def _scale(local: Float64, reduced: Float64) -> Float64:
    """[steps, 1]: square of a loss scale, and of what clipping divides by, which a watched program's local gradients
    have and its reduced ones have not; 1 where not both are known."""
    known = np.isfinite(local + reduced)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sum(local, 1, where=known, keepdims=True) / np.sum(reduced, 1, where=known, keepdims=True)
    return np.where(np.isfinite(found) & (found > 0), found, 1.0)


def _largest(values: Float64, window: int) -> Float64:
    found = values.copy()
    for lag in range(1, min(window, len(values))):
        found[lag:] = np.fmax(found[lag:], values[:-lag])
    return found


@dataclass(frozen=True)
class Jump:
    steps: NDArray[np.int64]
    tensors: NDArray[np.int64]
    """Index in `Apart.names`."""
    observed: Float64
    allowed: Float64

    def at(self, chosen: NDArray[np.bool_]) -> Jump:
        return Jump(self.steps[chosen], self.tensors[chosen], self.observed[chosen], self.allowed[chosen])


def gradient_jumps(found: Apart, distances: Float64, envelope: Envelope, last_stable: int) -> Jump:
    """Distances of gradients given those of the weights.

    Args: distances: `found.local` or `found.reduced`. last_stable: last step at which the control is stable.
    """
    whole = np.array([envelope.tensor(name, numel) for name, numel in zip(found.names, found.numel, strict=True)])
    sums = np.array([envelope.floor(name) for name in found.names])
    counted = envelope.is_low_precision and not (envelope.arm.fp8 or envelope.control.fp8 or envelope.flips)
    floors = whole / SAFETY if counted else whole
    burst = np.where(found.steps <= last_stable, 1.0, BURST)[:, None]
    before = found.before[:, None]
    known = np.nan_to_num(distances, nan=0.0)
    first = distances[:1] if found.steps[0] == 1 else np.full_like(distances[:1], np.nan)
    alike = (before == 0.0) & (first == 0.0) & bool(np.isfinite(found.weights).all())
    floors = np.where(alike, np.minimum(sums, floors), floors)
    rounding = np.where(np.isnan(first), whole, 4 * first)
    above = np.sqrt(np.maximum(0.0, known**2 - rounding**2))
    with np.errstate(divide="ignore", invalid="ignore"):
        curvature = np.where(before > 0, above / before, 0.0)
    largest = np.maximum.accumulate(np.maximum(curvature.max(1, keepdims=True), 1.0))
    held = np.concatenate((np.ones_like(largest[:1]), largest[:-1]))
    return _farthest(found, distances, DRAW * np.maximum(floors, JUMP * burst * held * before))


def weight_jumps(found: Apart, push: Perturbation, last_stable: int) -> Jump:
    """Distances of weights from the second kept step on, against their past maximum.

    `last_stable`: the last step at which the control is stable.
    """
    known = np.nan_to_num(found.weights, nan=0.0)
    typical = np.sqrt((known**2).mean(1, keepdims=True))
    largest = np.maximum.accumulate(np.maximum(known, typical))
    held = np.concatenate((np.full_like(largest[:1], np.inf), largest[:-1]))
    gradients = np.nan_to_num(np.fmax(found.local, found.reduced), nan=0.0, posinf=np.inf).max(1, keepdims=True)
    perturbation = 4.0 * push.given(gradients) * np.nan_to_num(found.moved, nan=np.inf)
    burst = np.where(found.steps <= last_stable, 1.0, BURST)[:, None]
    return _farthest(found, found.weights, DRAW * (STRIDE * burst * held + perturbation))


def _farthest(found: Apart, distances: Float64, allowed: Float64) -> Jump:
    seen = ~np.isnan(distances).all(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(np.isnan(distances), -1.0, np.nan_to_num(distances / allowed, nan=0.0, posinf=np.inf))
    places = ratios.argmax(1)
    rows = np.flatnonzero(seen)
    return Jump(
        found.steps[rows],
        places[rows],
        distances[rows, places[rows]],
        np.broadcast_to(allowed, ratios.shape)[rows, places[rows]],
    )
