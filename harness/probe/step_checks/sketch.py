"""Signed random projections of tensors, the same in every layout.

[Note: Sketches] Let a tensor be a matrix of its first dimension by all others, and let each of its rows be cut into
*cells* of w elements. Sketch j of it is

    S_j(x) = sum over rows r, cells q, elements i of  rows_j[r] * cells_j[q] * within[i] * x[r, q, i]

with signs drawn once from the tensor's name (and from j, but for those within a cell). It is linear and needs nobody
else's elements: the sketches of pieces add up to that of the whole, those of local gradients to that of their sum. For
signs independent of x, E[S_j(x)^2] = |x|^2, so that m sketches of two runs tell the distance of two tensors with the
error of a mean of m squares (Alon, Matias and Szegedy 1996; products of signs as in Kane and Nelson 2014). A product of
signs, unlike a sign an element, costs no random number an element. Its fourth moment is 3 as that of independent signs
for what has no such structure, 9 for an outer product of rows and columns, and at most 27.

[Note: Cells] All m sketches share the signs within a cell: one product an element makes a number a cell, and only those
numbers are added up m times, so that four sketches cost little more than one. What is off in one cell alone has one
draw and not m; so cells are short (`CELL` elements at most, an eighth of a row at most), and a row has eight or more.

Sums are fp64 whatever the tensor holds: equal tensors have sketches that differ by the order of additions at most.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

SKETCHES = 4
"""m: all miss a difference by a factor of twenty with a chance of less than one in 50,000."""

AT_ONCE = 1 << 16
"""Elements widened to fp64 at a time: a quarter of a core's own cache."""

CELL = 64
"""Most elements of a cell: with four sketches, sums of cells cost a sixteenth of a product an element."""

CELLS = 8
"""Least cells of a row, if it has as many elements."""


class Sketch(NamedTuple):
    """Sketches of one tensor or a piece of it; or of several, with an axis in front."""

    values: Tensor
    """fp64 [m]."""
    squares: Tensor
    """Sum of the squared elements; fp64 []."""

    @classmethod
    def stack(cls, several: Sequence[Sketch]) -> Sketch:
        """Stack on the CPU: [n, m] and [n], with one copy from a device; empty ones may be on the CPU before."""
        device = next((each.values.device for each in several if each.values.device.type != "cpu"), torch.device("cpu"))
        values, squares = (torch.stack([each[part].to(device) for each in several]).cpu() for part in (0, 1))
        return cls(values, squares)


def added(seen: Sequence[tuple[int, Sketch]], tensors: int) -> Sketch:
    """Sums of sketches by the index of their tensor: [tensors, m] and [tensors], on the CPU; 0 for those without."""
    found = Sketch(torch.zeros(tensors, SKETCHES, dtype=torch.float64), torch.zeros(tensors, dtype=torch.float64))
    if seen:
        at, each = torch.tensor([index for index, _ in seen]), Sketch.stack([sketch for _, sketch in seen])
        found.values.index_add_(0, at, each.values)
        found.squares.index_add_(0, at, each.squares)
    return found


@dataclass(frozen=True)
class Place:
    """Rows and columns of a piece in its tensor as a matrix; columns are all dimensions but the first."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(cls, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Place:
        """Place of a piece that is whole in all dimensions but the first two. Raises `ValueError`: another is cut."""
        if not shape:
            return cls((0, 1), (0, 1))
        if any(size != full for size, full in zip(sizes[2:], shape[2:], strict=True)):
            raise ValueError(f"a piece {list(sizes)} of {list(shape)} is cut behind its second dimension")
        behind = math.prod(shape[2:])
        begin, length = (offsets[1], sizes[1]) if len(shape) > 1 else (0, 1)
        return cls((offsets[0], offsets[0] + sizes[0]), (begin * behind, (begin + length) * behind))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        return cls.of(shape, [0] * len(shape), list(shape))

    @property
    def numbers(self) -> list[int]:
        return [*self.rows, *self.columns]

    @property
    def numel(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def index(self, wanted: int, width: int) -> int | None:
        """Flat index into the piece of an element of the whole tensor; None if it is elsewhere."""
        (top, bottom), (left, right) = self.rows, self.columns
        row, column = divmod(wanted, width)
        inside = top <= row < bottom and left <= column < right
        return (row - top) * (right - left) + column - left if inside else None


def cell_of(width: int) -> int:
    """Elements of a cell, a divisor of the row's width; see [Note: Cells]."""
    longest = max(1, min(CELL, width // CELLS))
    return next(length for length in range(longest, 0, -1) if width % length == 0)


class Drawn(NamedTuple):
    """Signs of one tensor, fp64."""

    rows: Tensor
    """[m, rows]"""
    cells: Tensor
    """[m, cells of a row]"""
    within: Tensor
    """[elements of a cell]"""


class Signs:
    def __init__(self) -> None:
        self._drawn: dict[tuple[str, torch.device], Drawn] = {}

    def sketch(self, name: str, shape: Sequence[int], piece: Tensor, place: Place, *, squares: bool = True) -> Sketch:
        """Sketch of a piece of the tensor with this name and full shape; `squares`: with the sum of squares."""
        drawn = self._of(name, shape, piece.device)
        (top, bottom), (left, right), length = place.rows, place.columns, len(drawn.within)
        matrix = piece.detach().reshape(bottom - top, right - left)  # detached: no graph is made
        if left % length or right % length:  # a piece that ends inside cells: with noughts beside it
            matrix = nn.functional.pad(matrix, (left % length, -right % length))
        cells = drawn.cells[:, left // length : -(-right // length)]
        return sketch(matrix, Drawn(drawn.rows[:, top:bottom], cells, drawn.within), squares=squares)

    def _of(self, name: str, shape: Sequence[int], device: torch.device) -> Drawn:
        key = (name, device)
        if key not in self._drawn:
            height, width = shape[0] if shape else 1, math.prod(shape[1:])
            length = cell_of(width)
            rows = self._draw(f"rows of {name}", height, SKETCHES)
            cells = self._draw(f"cells of {name}", width // length, SKETCHES)
            within = self._draw(f"places within cells of {name}", length, 1)
            of_rows, of_cells = (signs.t().contiguous().to(device) for signs in (rows, cells))
            self._drawn[key] = Drawn(of_rows, of_cells, within[:, 0].to(device))
        return self._drawn[key]

    def _draw(self, of: str, count: int, each: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(of.encode()))
        return torch.randint(0, 2, (count, each), generator=generator).mul_(2).sub_(1).to(torch.float64)


class _Scratch(threading.local):
    """Buffer of a thread, kept: new ones would cost more in page faults than the arithmetic."""

    held: Tensor | None = None

    def widen(self, part: Tensor) -> Tensor:
        """Part in fp64, valid until the next call."""
        if part.dtype is torch.float64:
            return part
        if part.device.type != "cpu" or part.numel() > AT_ONCE:
            return part.to(torch.float64)
        if self.held is None:
            self.held = torch.empty(AT_ONCE, dtype=torch.float64)
        return self.held[: part.numel()].view(part.shape).copy_(part)


_scratch = _Scratch()


def sketch(matrix: Tensor, signs: Drawn, *, squares: bool = True) -> Sketch:
    """Sketch a matrix of whole cells, in parts, with the signs of its rows and cells.

    Args: squares: compute them; else 0.
    """
    length = len(signs.within)
    step = max(1, AT_ONCE // max(1, matrix.shape[1]))
    sums, squared = [], []
    for begin in range(0, matrix.shape[0], step):
        part = _scratch.widen(matrix[begin : begin + step]).reshape(-1)
        sums.append(torch.mv(part.view(-1, length), signs.within))
        if squares:
            squared.append(torch.dot(part, part))
    if not sums:
        return Sketch(signs.rows.sum(1), signs.within.new_zeros(()))
    of_cells = sums[0] if len(sums) == 1 else torch.cat(sums)
    of_rows = signs.cells @ of_cells.view(matrix.shape[0], signs.cells.shape[1]).t()
    total = squared[0] if len(squared) == 1 else torch.stack(squared).sum() if squared else of_cells.new_zeros(())
    return Sketch((of_rows * signs.rows).sum(1), total)
