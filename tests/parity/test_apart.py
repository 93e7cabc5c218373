"""How two runs part, by their sketches: what clean pairs were seen to do is no jump, and what a fault does is one.

Distances are written down here, and not drawn: x of all weights after each step, and K (how much farther off a
gradient is, given the weights) of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.parity.tiers import divergence
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.divergence import Apart
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.trajectory import Perturbation, Series
from harness.store import check_stream
from harness.store.check_stream import CheckedTensor, StreamWriter, step_columns, tensor_columns
from harness.store.rundir import flatten
from tests.parity.corpus import BF16, FP32, OURS, OURS_BF16
from tests.support.mutants import finds

STEPS = 12
NAMES = ("embedding.weight", "blocks.0.w_up.weight", "head.output.weight")
NUMEL = (768, 2048, 384)
ENVELOPE = Envelope(Arithmetic.of(flatten(OURS.config())), Arithmetic.of(flatten(FP32.config())))
ENVELOPE_BF16 = Envelope(*(Arithmetic.of(flatten(each.config())) for each in (OURS_BF16, BF16)))
ROUNDING = 2e-7
"""Of a gradient at step 1, as fp32 shows it."""
CLOSE = 1e-5 * 1.2 ** np.arange(STEPS)
"""Relative distance of weights after each step of a stable pair; what a gradient is allowed to be off at step 1 is no
more than a few times that."""
UNLUCKY = 3.5
"""What four sketches may overstate a distance by (docs/verdicts.md)."""


def parted(weights: Any, given: dict[tuple[int, int], float], steps: Any = None, before: Any = None) -> Apart:
    """Two runs whose weights are so far apart after each step, [steps] or [steps, tensors], and whose gradients are K
    times as far as all weights were `before`: once, or as `given` for a (step, tensor)."""
    numbers = np.arange(1, STEPS + 1) if steps is None else np.array(steps)
    each = np.array(weights, float)
    each = np.repeat(each[:, None], 3, 1) if each.ndim == 1 else each
    whole = np.sqrt((each**2).mean(1))
    factors = np.ones(each.shape)
    for (step, tensor), value in given.items():
        factors[[*numbers].index(step), tensor] = value
    had = np.concatenate(([0.0], whole[:-1])) if before is None else before
    local = np.hypot(ROUNDING, factors * had[:, None])
    return Apart(numbers, NAMES, NUMEL, each, local, local, np.full(each.shape, 1e-2), whole)


def jumps(found: Apart, last_stable: int = STEPS, envelope: Envelope = ENVELOPE) -> dict[int, str]:
    """Steps at which a gradient jumps, and whose."""
    return beyond(divergence.gradient_jumps(found, found.local, envelope, last_stable))


def strides(
    found: Apart, perturbation: float = 1e-9, last_stable: int = STEPS, gradients: float = 0.0
) -> dict[int, str]:
    """Steps at which weights jump, with gradients so many times as far apart as they are."""
    found = replace(found, local=gradients * found.local, reduced=gradients * found.reduced)
    return beyond(divergence.weight_jumps(found, Perturbation(perturbation, perturbation), last_stable))


def beyond(jump: Series) -> dict[int, str]:
    there = np.flatnonzero(jump.observed > jump.allowed)
    assert jump.tensors is not None
    return {int(jump.steps[at]): jump.tensors[at] for at in there}


def missing(found: Apart, tensor: int) -> Apart:
    """As if the engine showed nothing of one tensor's gradient."""
    found.local[:, tensor] = np.nan
    return found


def overtaken() -> Apart:
    """At step 9 a gradient that is wrong makes its own step's weights as wrong."""
    return parted([*CLOSE[:8], *[1e-2] * 4], {(9, 1): 300.0}, before=np.array([0.0, *CLOSE[:8], *[1e-2] * 3]))


def baselines(first: float = 0.0, shown: float = 0.0, off: float = 2e-3) -> Apart:
    """Two runs that agree in every bit up to step 9, where a gradient is off by less than bf16 rounds it."""
    weights = np.zeros((STEPS, 3))
    weights[:, 2] = shown
    local = np.zeros((STEPS, 3))
    local[0, 1], local[8, 1] = first, off
    whole = np.sqrt(np.nansum(weights**2, 1))
    ones = np.ones((STEPS, 3))
    return Apart(np.arange(1, STEPS + 1), NAMES, NUMEL, weights, local, local, ones, whole)


OF_FP64 = {(11, 0): 11.0, (12, 1): 123.0}
"""What was seen at steps 11 and 12 of `study=against_fp64`: one tensor, and in the next step another."""
NEAR = np.where(np.arange(STEPS) < 3, 1e-9, CLOSE)
"""Weights that begin nearer together than a gradient's rounding is large."""
BENT = np.where(np.arange(STEPS) < 6, CLOSE / 50, CLOSE)
"""Weights that begin so near together that curvature shows above rounding, and within the bound of step 1."""
SPARSE = [1, 2, 3, 4, 8, 12]
"""Kept steps of a long run."""

CLAIMS: dict[str, tuple[Callable[[], dict[int, str]], dict[int, str]]] = {
    "a pair that parts slowly": (lambda: jumps(parted(CLOSE, {})), {}),
    "a batch that bends the loss, for one tensor and then for another": (lambda: jumps(parted(CLOSE, OF_FP64)), {}),
    "curvature that was there before": (lambda: jumps(parted(CLOSE, {(4, 0): 20.0, (12, 1): 400.0})), {}),
    "curvature 11 times what it was, and overstated": (lambda: jumps(parted(CLOSE, {(9, 1): 11 * UNLUCKY})), {}),
    "a gradient 200 times as far off": (lambda: jumps(parted(CLOSE, {(9, 1): 200.0})), {9: NAMES[1]}),
    "the same, and its step's weights with it": (lambda: jumps(overtaken()), {9: NAMES[1]}),
    "the same, where nothing is shown of another": (
        lambda: jumps(missing(parted(CLOSE, {(9, 1): 200.0}), 0)),
        {9: NAMES[1]},
    ),
    "the same, after weights nearer than rounding": (lambda: jumps(parted(NEAR, {(9, 1): 200.0})), {9: NAMES[1]}),
    "curvature that shows above rounding, within the bound of step 1": (
        lambda: jumps(parted(BENT, {(4, 2): 25.0, (9, 1): 60.0})),
        {},
    ),
    "a burst once training is not stable": (lambda: jumps(parted(CLOSE, {(9, 1): 600.0}), last_stable=7), {}),
    "the same burst in stable training": (lambda: jumps(parted(CLOSE, {(9, 1): 600.0}), last_stable=9), {9: NAMES[1]}),
    "more than bursts were seen to be": (lambda: jumps(parted(CLOSE, {(9, 1): 4e4}), last_stable=7), {9: NAMES[1]}),
    "a gradient of baselines in 16 bits": (lambda: jumps(baselines(), envelope=ENVELOPE_BF16), {9: NAMES[1]}),
    "the same, where kernels did not agree": (lambda: jumps(baselines(first=1e-3), envelope=ENVELOPE_BF16), {}),
    "the same, where it is off by more": (
        lambda: jumps(baselines(first=1e-3, off=0.25), envelope=ENVELOPE_BF16),
        {9: NAMES[1]},
    ),
    "the same, where gradients of step 1 overflowed": (
        lambda: jumps(baselines(first=np.nan), envelope=ENVELOPE_BF16),
        {},
    ),
    "the same, where weights are not all shown": (lambda: jumps(baselines(shown=np.nan), envelope=ENVELOPE_BF16), {}),
    "the same, where weights do not agree": (lambda: jumps(baselines(shown=1e-9), envelope=ENVELOPE_BF16), {}),
    "steps between kept ones": (
        lambda: jumps(parted([*[1e-6] * 4, 1e-3, 1e-1], {}, SPARSE, np.array([0.0, *[1e-6] * 3, 5e-4, 5e-2]))),
        {},
    ),
    "weights that go three times as far in a step, and are overstated": (
        lambda: strides(parted([1e-6] * 6 + [3e-6 * UNLUCKY] * 6, {})),
        {},
    ),
    "weights of one tensor 100 times as far": (lambda: strides(parted(_one_tensor(100), {})), {9: NAMES[2]}),
    "the same, where a gradient was as far": (
        lambda: strides(parted(_one_tensor(1000), {(9, 1): 1e4}), gradients=1.0),
        {},
    ),
    "the same, where training is not stable": (lambda: strides(parted(_one_tensor(1000), {}), last_stable=4), {}),
    "weights that were equal, in training that is not stable": (
        lambda: strides(parted([0.0] * 8 + [1e-3] * 4, {}), last_stable=4),
        {9: NAMES[0]},
    ),
    "the perturbation of an update": (lambda: strides(parted([1e-9] + [1e-5] * 11, {}), perturbation=1e-3), {}),
    "the first weights there are": (lambda: strides(parted([1e-5] * STEPS, {})), {}),
}
"""What two runs do, and where that is a jump."""


def _one_tensor(factor: float) -> Any:
    weights = np.full((STEPS, 3), 1e-6)
    weights[8:, 2] *= factor
    return weights


def wrong(root: Path) -> Iterator[str]:
    """What is not as it is claimed, and what distances should be, and are not, lazily."""
    for name, (said, wanted) in CLAIMS.items():
        found = said()
        if (found if not wanted else dict([*found.items()][:1])) != wanted:
            yield f"{name}: {found}"
    yield from wrong_distances(root)


# -- distances from sketches -------------------------------------------------------------------------------------------

TENSORS = [CheckedTensor(f"w{number}", (4, 4)) for number in range(100)]
SKETCHES = 4


def stream(folder: Path, tables: Sequence[Any]) -> check_stream.Stream:
    """The stream of a run that kept these tables, [tensors][columns] each."""
    writer = StreamWriter(folder, TENSORS, SKETCHES, 1, 0)
    for step, table in enumerate(tables, start=1):
        writer.write(step, [0.0] * len(step_columns(SKETCHES)), table)
    writer.close()
    found = check_stream.read(folder)
    assert found is not None
    return found


def tables(norms: Sequence[float], off: Sequence[float], seed: int) -> tuple[list[Any], list[Any]]:
    """Of an arm and a control: gradients of these norms, in the control, and so far from it; by step. Sketches of what
    is apart are normal, with its norm as their deviation."""
    rng, names = np.random.default_rng(seed), tensor_columns(SKETCHES)
    made: tuple[list[Any], list[Any]] = ([], [])
    for norm, far in zip(norms, off, strict=True):
        control = np.zeros((len(TENSORS), len(names)))
        control[:] = rng.standard_normal(control.shape)
        control[:, names.index("reduced_squares")] = norm**2
        control[:, names.index("after_squares")] = 1.0
        arm = control.copy()
        for key in ("local", "reduced", "after"):
            columns = [names.index(f"{key}_{number}") for number in range(SKETCHES)]
            arm[:, columns] += far * rng.standard_normal((len(TENSORS), SKETCHES))
        made[0].append(arm)
        made[1].append(control)
    return made


def distances(root: Path, norms: Sequence[float], off: Sequence[float]) -> Apart:
    arm, control = tables(norms, off, seed=3)
    found = divergence.apart(stream(root / "arm", arm), stream(root / "control", control))
    assert found is not None
    return found


def wrong_distances(root: Path) -> Iterator[str]:

    found = distances(root / "plain", [1.0] * 3, [1e-3] * 3)
    for kind in ("local", "reduced", "weights"):
        typical = float(np.sqrt((getattr(found, kind) ** 2).mean()))
        if not 0.9 < typical / 1e-3 < 1.1:
            yield f"{kind} is {typical} in the mean square of 1200 draws, and 1e-3 apart"
    cancels = distances(root / "cancels", [1.0] * 6 + [1e-3] + [1.0] * 3, [1e-6] * 10)
    if cancels.local[6].max() > 1e-5:
        yield "a gradient that happens to cancel is far off"
    shrinks = distances(root / "shrinks", [1.0] + [1e-3] * 19, [1e-4] * 20)
    if shrinks.local[-1].max() < 1e-2:
        yield "a gradient that was large long ago is not far off"


# -- mutants -----------------------------------------------------------------------------------------------------------

CONSTANTS = (
    ("JUMP", 5, "Curvature that bursts as clean pairs' did is a jump"),
    ("JUMP", 75, "A gradient 200 times as far off is none"),
    ("BURST", 1, "Hot training gets no more room than stable training"),
    ("BURST", 62_500, "In hot training nothing is a jump"),
    ("STRIDE", 1, "Weights that part threefold in a step jump"),
    ("STRIDE", 100, "Weights 100 times as far apart do not"),
    ("WINDOW", 1, "A gradient is held against its norm at that step, which may cancel"),
    ("WINDOW", 10**6, "A gradient is held against the largest that it ever was"),
)
test_a_mutant_is_noticed = finds(
    "The comparator: how runs part",
    wrong="\n".join(
        f"{name} is {value:g}: {breaks}\n    parity.tiers.divergence.{name}: {value}"
        for name, value, breaks in CONSTANTS
    )
    + """
BURST always: Stable training gets the room of hot
    parity.tiers.divergence.gradient_jumps: found.steps <= last_stable => found.steps <= 0
margin for sums that cancel: In 16 bits a gradient is allowed what one that cancels may be off by
    parity.tiers.divergence.gradient_jumps: whole / SAFETY if counted else whole => whole
baselines are rounded too: Gradients of equal weights by equal kernels are allowed what rounding explains
    parity.tiers.divergence.gradient_jumps: np.minimum(sums, floors) => floors
baselines whatever step 1 said: Kernels are taken to be the same where weights are
    parity.tiers.divergence.gradient_jumps: & (first == 0.0) =>
baselines by what overflowed: Gradients that overflowed count as equal
    parity.tiers.divergence.gradient_jumps: & (first == 0.0) => & (known[:1] == 0.0)
baselines by what is not shown: Weights that nobody showed count as equal
    parity.tiers.divergence.gradient_jumps: & bool(np.isfinite(found.weights).all()) =>
K of each tensor: A tensor's curvature is held against its own alone, as it was before `study=against_fp64`
    parity.tiers.divergence.gradient_jumps: curvature.max(1, keepdims=True) => curvature
K of the present step: A gradient is held against the curvature that it shows itself
    parity.tiers.divergence.gradient_jumps: np.concatenate((np.ones_like(largest[:1]), largest[:-1])) => largest
K of the last step: Curvature of earlier steps is forgotten
    parity.tiers.divergence.gradient_jumps: np.maximum.accumulate( => (
rounding is curvature: Rounding over nearly equal weights counts as K
    parity.tiers.divergence.gradient_jumps: known**2 - rounding**2 => known**2
K above the bound: Curvature counts only where it lies above what step 1 would be allowed
    parity.tiers.divergence.gradient_jumps: whole, 4 * first) => whole, np.maximum(4 * first, floors))
weights after the step: A gradient is held against the weights that it made itself
    parity.tiers.divergence.Apart.before: np.where(follows, shifted, self.whole) => self.whole
kept steps follow each other: Weights before a step are taken to be those of the kept step before, however long ago
    parity.tiers.divergence.Apart.before: np.where(follows, shifted, self.whole) => shifted
no perturbation: What rounding makes of one update is a jump
    parity.tiers.divergence.weight_jumps: STRIDE * burst * held + perturbation => STRIDE * burst * held
no gradient's perturbation: Weights that a gradient moved have jumped
    parity.tiers.divergence.weight_jumps: push.given(gradients) => push.weights
one stride in hot training: Weights burst in no training
    parity.tiers.divergence.weight_jumps: STRIDE * burst * held => STRIDE * held
the first weights are judged: The first step has no past
    parity.tiers.divergence.weight_jumps: np.full_like(largest[:1], np.inf) => 0 * largest[:1]
what is not shown is worst: NaN stands for every tensor
    parity.tiers.divergence._farthest: np.isnan(distances), -1.0 => np.isnan(distances), np.inf
sketches are added: Squares of sketches are added where their mean is the distance
    parity.tiers.divergence._squares: ((left - right) ** 2).mean(-1) => ((left - right) ** 2).sum(-1)
reduced against local: The arm's reduced gradient is held against the control's local ones
    parity.tiers.divergence._squares: columns(arm, "reduced"), sums) => columns(arm, "reduced"), local)
""",
)
