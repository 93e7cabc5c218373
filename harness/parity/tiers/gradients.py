"""One pass over two captures of the same step: distance, direction and place of the difference, per tensor.

The arm's gradient is fitted as g = (1 + b) c + r to the control's c by least squares. b is a scale error; r, orthogonal
to c, is everything else. docs/verdicts.md ("Scale") says why the standard error of b is cluster-robust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.parity.tensors import Capture, Float64

BLOCKS = 32
"""Pieces of a tensor: a fault in one rank's shard or in a padded tail shows in a few of them."""

HANDFUL = 32
"""Tensors with fewer elements have no usable scale: a gain of one element has no residual, and a standard error from
few products is a guess."""


@dataclass(frozen=True)
class Block:
    start: int
    stop: int
    distance: float
    """Norm of its difference, over the root mean square of its own norm and of an average piece's."""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TensorPair:
    """Comparison of one tensor. Distances and b are relative to the control."""

    name: str
    bits_equal: bool
    finite: bool
    control_finite: bool
    numel: int
    arm_norm: float
    norm: float
    distance: float
    """Norm of the difference over the control's norm."""
    b: float
    standard_error: float
    residual: float
    """Norm of r over the control's norm."""
    block: Block
    carried_by: float = math.inf
    """Effective number of elements that carry b: (sum of squares)^2 over the sum of fourth powers.

    If small, b was fitted to those elements, so that residual and standard error are too small.
    """

    @property
    def where(self) -> str:
        """Elements of its worst piece."""
        return f"elements {self.block.start} to {self.block.stop} of {self.numel}"


@dataclass(frozen=True)
class Mismatch:
    name: str
    arm: str
    control: str


def names(arm: Capture, control: Capture) -> tuple[list[str], list[Mismatch]]:
    both: list[str] = []
    odd: list[Mismatch] = []
    for name in sorted(arm.tensors.keys() | control.tensors.keys()):
        left, right = (capture.tensors.get(name) for capture in (arm, control))
        if left is not None and right is not None and left.shape == right.shape:
            both.append(name)
        else:
            odd.append(Mismatch(name, *("absent" if t is None else str(list(t.shape)) for t in (left, right))))
    return both, odd


def compared(arm: Capture, control: Capture) -> list[TensorPair]:
    """Pairs of the tensors that both have."""
    return [compare_tensor(name, arm, control) for name in names(arm, control)[0]]


def compare_tensor(name: str, arm: Capture, control: Capture) -> TensorPair:
    """Raises `KeyError`: one of the captures does not have it."""
    equal = arm.tensors[name].dtype == control.tensors[name].dtype and _same_bits(name, arm, control)
    return compare_values(name, arm.values(name), control.values(name), equal=equal)


def compare_values(name: str, a: Float64, c: Float64, *, equal: bool = False) -> TensorPair:
    """Two arrays of one shape, fp64; `equal` where their bits are known to be."""
    squares = c * c
    square = float(squares.sum())
    arm_norm = math.sqrt(square) if equal else length(a)
    if not (math.isfinite(square) and math.isfinite(arm_norm)):  # a sum of squares may overflow where no value is odd
        finite, control_finite = bool(np.isfinite(a).all()), bool(np.isfinite(c).all())
        if not (finite and control_finite):
            return _plain(name, equal, a.size, math.nan, math.nan, math.nan, finite, control_finite)
    if equal:
        return _plain(name, True, a.size, arm_norm, arm_norm, 0.0)
    if square == 0.0:
        return _plain(name, False, a.size, arm_norm, 0.0, math.inf if arm_norm else 0.0)
    return _fit(name, a - c, c, squares, square, arm_norm)


def _plain(
    name: str,
    equal: bool,
    numel: int,
    arm_norm: float,
    norm: float,
    off: float,
    finite: bool = True,
    control_finite: bool = True,
) -> TensorPair:
    whole = Block(0, numel, off)
    return TensorPair(name, equal, finite, control_finite, numel, arm_norm, norm, off, off, 0.0, off, whole)


def _same_bits(name: str, arm: Capture, control: Capture) -> bool:
    left, right = arm.raw(name), control.raw(name)
    bits = np.dtype(f"u{left.dtype.itemsize}")
    return bool(np.array_equal(left.view(bits), right.view(bits)))


def dot(left: Float64, right: Float64) -> float:
    """Inner product, summed pairwise: more accurate than BLAS, and independent of threads, which cost milliseconds to
    wake."""
    return float((left * right).sum())


def length(values: Float64) -> float:
    return math.sqrt(dot(values, values))


def _fit(name: str, difference: Float64, c: Float64, squares: Float64, square: float, arm_norm: float) -> TensorPair:
    """Args: squares, square: of the control, and their sum."""
    apart, norm = difference * difference, math.sqrt(square)
    b = dot(difference, c) / square
    rest = difference - b * c
    return TensorPair(
        name=name,
        bits_equal=False,
        finite=True,
        control_finite=True,
        numel=c.size,
        arm_norm=arm_norm,
        norm=norm,
        distance=math.sqrt(float(apart.sum())) / norm,
        b=b,
        standard_error=_standard_error(rest, c, square),
        residual=length(rest) / norm,
        block=_worst_block(apart.ravel(), squares.ravel(), square),
        carried_by=square**2 / fourth if (fourth := dot(squares, squares)) else 1.0,
    )


def _standard_error(rest: Float64, c: Float64, square: float) -> float:
    products = (rest * c).reshape(rest.shape[0] if rest.ndim else 1, -1)
    axes = [axis for axis in (0, 1) if products.shape[1 - axis] > 1]
    return max((length(products.sum(axis)) / square for axis in axes), default=0.0)


def _worst_block(apart: Float64, squares: Float64, square: float) -> Block:
    edges = np.linspace(0, squares.size, min(BLOCKS, squares.size) + 1).astype(np.int64)
    edges = edges[np.diff(edges, prepend=-1) > 0]  # `np.unique` would import numpy.ma, 20 ms
    begins, sizes = edges[:-1], np.diff(edges)
    off, own = (np.add.reduceat(values, begins) for values in (apart, squares))
    distances = np.sqrt(off / ((own + square * sizes / squares.size) / 2))
    worst = int(distances.argmax())
    return Block(int(begins[worst]), int(begins[worst] + sizes[worst]), float(distances[worst]))


@dataclass(frozen=True)
class Pooled:
    b: float
    standard_error: float
    residual: float
    """Norm of all residuals over the norm of the whole gradient."""
    distance: float
    """Norm of the whole difference over the norm of the whole gradient."""


def pool(pairs: list[TensorPair]) -> Pooled:
    """Combine the tensors' b: a weighted mean in which each tensor has its own coherent error.

    The weights are 1 / (SE^2 + tau^2), where tau is the spread of the tensors' b beyond their standard errors (the
    moment estimate of random-effects meta-analysis). Tensors of one unit (a block) share upstream errors, so the
    standard error is that of as many independent values as there are units. Tensors below `HANDFUL` are left out, if
    others exist.
    """
    used = [pair for pair in pairs if pair.norm > 0]  # a norm that is not a number is not above 0
    used = [pair for pair in used if pair.numel >= HANDFUL] or used
    total = math.sqrt(math.fsum(pair.norm**2 for pair in used))
    if not used or total == 0.0:
        return Pooled(0.0, 0.0, 0.0, 0.0)
    tau2 = _spread(used)
    floor = 1e-300 + 1e-30 * max((pair.distance for pair in used), default=0.0) ** 2
    weights = [1.0 / (pair.standard_error**2 + tau2 + floor) for pair in used]
    mean = math.fsum(w * pair.b for w, pair in zip(weights, used, strict=True)) / math.fsum(weights)
    design = len(used) / len({unit(pair.name) for pair in used})
    return Pooled(
        b=mean,
        standard_error=math.sqrt(design / math.fsum(weights)),
        residual=math.sqrt(math.fsum((pair.residual * pair.norm) ** 2 for pair in used)) / total,
        distance=math.sqrt(math.fsum((pair.distance * pair.norm) ** 2 for pair in used)) / total,
    )


def _spread(pairs: list[TensorPair]) -> float:
    """tau^2: variance of the tensors' b beyond their standard errors."""
    if len(pairs) < 2:
        return 0.0
    mean = math.fsum(pair.b for pair in pairs) / len(pairs)
    variance = math.fsum((pair.b - mean) ** 2 for pair in pairs) / (len(pairs) - 1)
    return max(0.0, variance - math.fsum(pair.standard_error**2 for pair in pairs) / len(pairs))


def unit(name: str) -> str:
    """Unit of a parameter: its name up to the first number, or its first part (`blocks.3`, `embedding`)."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]
