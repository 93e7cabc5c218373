"""Distance of two runs at every step from the sketches in their streams, its jumps, and steps of two equal runs.

With m sketches S_j of one tensor the mean of (S_j(a) - S_j(c))^2 is the squared distance, with the error of a
chi-square of m degrees of freedom. docs/verdicts.md ("Two runs with every step checked") derives the bounds. Jumps and
losses raise a doubt and refute nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.config.update_rule import KNOWN
from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tensors import Float64
from harness.parity.tiers.arithmetic import SAFETY
from harness.parity.tiers.comparable import is_one, matters
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.trajectory import ROUNDED, Perturbation, Series, relative
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
    (left_steps, left), (right_steps, right) = arm.kept, control.kept
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
        found: Float64 = rows[..., _columns(sketches, kind)[:sketches]]
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


def gradient_jumps(found: Apart, distances: Float64, envelope: Envelope, last_stable: int) -> Series:
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


def weight_jumps(found: Apart, push: Perturbation, last_stable: int) -> Series:
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


def _farthest(found: Apart, distances: Float64, allowed: Float64) -> Series:
    """Farthest tensor of each step beside what is allowed."""
    seen = ~np.isnan(distances).all(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(np.isnan(distances), -1.0, np.nan_to_num(distances / allowed, nan=0.0, posinf=np.inf))
    rows, places = np.flatnonzero(seen), ratios.argmax(1)[seen]
    observed, limit = distances[rows, places], np.broadcast_to(allowed, ratios.shape)[rows, places]
    steps, never, names = found.steps[rows], np.full(len(rows), np.inf), np.array(found.names, dtype=object)[places]
    return Series(WEIGHTS, Stage.optimizer, steps, observed, limit, never, note=UNEXPLAINED, tensors=names)


GIVEN = "{} given the weights"
WEIGHTS = "weights given those before"
JUMPS = (*(GIVEN.format(what) for what in ("local gradient", "gradient", "loss")), WEIGHTS)
"""Checks of a jump: they raise a doubt at the step where it begins, and refute nothing."""


UNEXPLAINED = "a jump: nothing that the two runs had come apart by before explains it"


def jumps(
    found: Apart,
    envelope: Envelope,
    push: Perturbation,
    last_stable: int,
    certain: int,
    *,
    wide: bool,
    first: int,
    begins: Stage,
    taken: Stage,
) -> list[list[Finding]]:
    """Jumps of gradients and weights, a list a kind.

    Args: last_stable: last step at which the control is stable. certain: last step up to which both are known right;
    weights are judged up to there, and while the control is stable. wide: main weights have more than 16 bits;
    otherwise weights are judged after `certain` alone. first: first step that is judged here. begins: stage in which
    one of the two may first use other weights. taken: last stage that gradients are recorded behind.
    """
    local = gradient_jumps(found, found.local, envelope, last_stable)
    reduced = gradient_jumps(found, found.reduced, envelope, last_stable)
    weights = weight_jumps(found, push, last_stable)
    asked = np.where(weights.steps <= certain, wide, weights.steps <= last_stable)
    seen, after = bool(len(local.steps)), Stage.clipping if len(reduced.steps) else begins
    kinds = []
    for check, series, stage, since in (
        (GIVEN.format("local gradient"), local, Stage.gradient, begins),
        (GIVEN.format("gradient"), reduced, taken, Stage.reduction if seen else begins),
        (WEIGHTS, weights.at(asked), Stage.optimizer, after),
    ):
        judged = replace(series.at(series.steps >= first), check=check, stage=stage, since=since)
        kinds.append(judged.findings())
    return [kind for kind in kinds if kind]


def losses(arm: Record, control: Record, envelope: Envelope, last: int, last_stable: int) -> list[Finding]:
    """Losses after step 1 up to `last` against the weights' distance, with a wider bound after `last_stable`."""
    left, right, slope = _by_distance(arm, control, last)
    steps, limit = np.arange(2, len(slope) + 2), np.full(len(slope), np.inf)
    with np.errstate(invalid="ignore"):
        slope *= np.where(steps <= last_stable, 1.0, math.sqrt(BURST))
    allowed = np.nan_to_num(envelope.loss + ROUNDED + slope, nan=np.inf)
    note = "a jump: the distance of the two runs' weights does not explain it"
    observed, check = relative(left, right), GIVEN.format("loss")
    return Series(check, Stage.gradient, steps, observed, allowed, limit, Stage.forward, note).findings()


def first_update(arm: Record, control: Record) -> float:
    """Relative difference of the loss at step 2 that the distance of the weights after step 1 explains; 0 if unknown.

    A small gradient of Adam may be taken for another sign by a rounding, and one such element of a small model is more
    than `trajectory.perturbation` expects of all together.
    """
    slope = _by_distance(arm, control, 2)[2]
    return float(slope[0]) if len(slope) and np.isfinite(slope[0]) else 0.0


def _by_distance(arm: Record, control: Record, last: int) -> tuple[Float64, Float64, Float64]:
    """Losses of both from step 2 to `last`, and what the weights' distance before explains, relative to them."""
    if arm.stream is None or control.stream is None:
        return (np.empty(0),) * 3
    count = min(arm.stream.sketches, control.stream.sketches)
    pairs = [tuple(run.stream.column(f"after_{j}") for run in (arm, control) if run.stream) for j in range(count)]
    rows = min(last, *(len(each) for pair in pairs for each in pair))
    squares = np.mean([(left[:rows] - right[:rows]) ** 2 for left, right in pairs], axis=0)
    looked = arm.stream.looked[:rows] & control.stream.looked[:rows]
    distances = np.maximum.accumulate(np.sqrt(np.where(looked, np.nan_to_num(squares, nan=np.inf), 0.0)))
    distances[~looked] = np.inf
    values = [np.array(run.series(key)[:rows], float) for key in ("loss", "grad_norm") for run in (arm, control)]
    left, right, steep, steeper = (each[1:] for each in values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return left, right, SAFETY * (steep + steeper) / 2 * distances[:-1] / np.abs(right)


ALIKE = "weights after equal gradients"
NOTE = "until then gradients, norms and weights were equal in every sketch; the update was not, or the moments it used"


def after_equal_gradients(arm: Record, control: Record) -> list[Finding]:
    if arm.stream is None or control.stream is None or not _one_configuration(arm, control):
        return []
    left, right = (_table(run.stream, run.length) for run in (arm, control) if run.stream)
    if left.shape[1:] != right.shape[1:] or arm.stream.tensors != control.stream.tensors:
        return []
    steps = _steps_of_equal_gradients(arm, control, left, right)
    return [_finding(arm, control, left[:steps], right[:steps])] if steps else []


def _one_configuration(arm: Record, control: Record) -> bool:
    keys = [key for key in arm.config.keys() | control.config.keys() if matters(key) and not key.startswith("fault.")]
    same_code = arm.provenance.get("sources_digest") == control.provenance.get("sources_digest")
    same = all(arm.config.get(key) == control.config.get(key) for key in keys) and not is_one(arm, control)
    return same and same_code and arm.config["optimizer.name"] in KNOWN


def _table(stream: Stream, length: int) -> Float64:
    """Columns [steps, tensors, columns] of the steps from the first on, up to one that was not kept."""
    steps, rows = stream.kept
    follows = steps == np.arange(1, len(steps) + 1)
    return rows[: min(length, len(steps) if follows.all() else int(np.argmin(follows)))]


def _columns(sketches: int, kind: str) -> list[int]:
    return [at for at, name in enumerate(tensor_columns(sketches)) if name.startswith(f"{kind}_")]


def _steps_of_equal_gradients(arm: Record, control: Record, left: Float64, right: Float64) -> int:
    assert arm.stream is not None
    gradients = _columns(arm.stream.sketches, "reduced")
    steps = min(len(left), len(right))
    equal = (left[:steps, :, gradients] == right[:steps, :, gradients]).all((1, 2))  # what was not seen is not equal
    for key in ("loss", "grad_norm", "lr", "skipped"):
        equal &= [one == other for one, other in zip(*(run.series(key)[:steps] for run in (arm, control)), strict=True)]
    return steps if equal.all() else int(np.argmin(equal))


def _finding(arm: Record, control: Record, left: Float64, right: Float64) -> Finding:
    assert arm.stream is not None
    weights = _columns(arm.stream.sketches, "after")
    differs = ~(left[:, :, weights] == right[:, :, weights]).all(2)
    if not differs.any():
        return measured(ALIKE, Stage.optimizer, 0.0, 0.0, step=len(left), count=len(left))
    step = int(differs.any(1).argmax())
    *sketches, squares = weights
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(left - right)[step][:, sketches].max(1) / np.sqrt(right[step][:, squares])
    tensor = int(np.where(differs[step], np.nan_to_num(off, nan=np.inf), -1.0).argmax())
    on_cpu = arm.config.get("cluster.device") == "cpu"
    return measured(
        ALIKE,
        Stage.optimizer,
        float(off[tensor]),
        0.0,
        0.0 if on_cpu else math.inf,
        step=step + 1,
        tensor=arm.stream.tensors[tensor].name,
        note=NOTE,
        since=Stage.clipping,
    )
