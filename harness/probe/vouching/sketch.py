"""Signed random projections of tensors, the same in every layout.

[Note: Sketches] Let a tensor be a matrix of its first dimension by all others. Sketch j of it is

    S_j(x) = sum over r, c of  rows_j[r] * columns_j[c] * x[r, c]

with signs drawn once from (j, the tensor's name). It is linear and needs nobody else's elements: the sketches of pieces
add up to that of the whole, those of local gradients to that of their sum. For signs independent of x, E[S_j(x)^2] =
|x|^2, so that m sketches of two runs tell the distance of two tensors with the error of a mean of m squares (Alon,
Matias and Szegedy 1996; products of signs as in Kane and Nelson 2014, whose fourth moment is at most 9 instead of 3).
A product of signs, unlike a sign an element, costs no random number an element and one pass through the memory.

Sums are fp64 whatever the tensor holds: equal tensors have sketches that differ by the order of additions at most.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SKETCHES = 4
"""m: a difference that all of so many miss by a factor of twenty has a chance of less than one in 50,000."""

AT_ONCE = 1 << 18
"""Elements widened to fp64 at a time: what fits into a core's own cache."""


class Sketch(NamedTuple):
    """Sketches of one tensor or a piece of it; or of several, with an axis in front."""

    values: Tensor
    """fp64 [m]."""
    squares: Tensor
    """Sum of the squared elements; fp64 []."""

    @classmethod
    def stack(cls, several: Sequence[Sketch]) -> Sketch:
        """Put several together, on the CPU: [n, m] and [n]."""
        values, squares = (torch.stack([each[part] for each in several]).cpu() for part in (0, 1))
        return cls(values, squares)


@dataclass(frozen=True)
class Place:
    """Which rows and columns of a tensor, seen as a matrix, a piece has; columns of all dimensions but the first."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(cls, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Place:
        """Find the place of a piece that is whole in all dimensions but the first two.

        Raises:
            ValueError: it is cut in another dimension.
        """
        if not shape:
            return cls((0, 1), (0, 1))
        if any(size != full for size, full in zip(sizes[2:], shape[2:], strict=True)):
            raise ValueError(f"a piece {list(sizes)} of {list(shape)} is cut behind its second dimension")
        behind = 1
        for extent in shape[2:]:
            behind *= extent
        begin, length = (offsets[1], sizes[1]) if len(shape) > 1 else (0, 1)
        return cls((offsets[0], offsets[0] + sizes[0]), (begin * behind, (begin + length) * behind))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """All rows and columns of a tensor of this shape."""
        return cls.of(shape, [0] * len(shape), list(shape))


class Signs:
    """Draws each tensor's signs once and keeps them."""

    def __init__(self, sketches: int = SKETCHES) -> None:
        self.sketches = sketches
        self._drawn: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def sketch(self, name: str, shape: Sequence[int], piece: Tensor, place: Place, *, squares: bool = True) -> Sketch:
        """Sketch this piece of the tensor that has the name and the full shape; `squares`: of it are wanted, too."""
        rows, columns = self._of(name, shape, piece.device)
        (top, bottom), (left, right) = place.rows, place.columns
        matrix = piece.detach().reshape(bottom - top, right - left)
        return sketch(matrix, rows[top:bottom], columns[:, left:right], squares=squares)

    def _of(self, name: str, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Signs of rows and of columns, fp64, [rows, m] and [m, columns], in which order BLAS is quickest."""
        key = (name, device)
        if key not in self._drawn:
            height = shape[0] if shape else 1
            width = 1
            for extent in shape[1:]:
                width *= extent
            drawn = (self._draw(name, "rows", height), self._draw(name, "columns", width))
            self._drawn[key] = (drawn[0].to(device), drawn[1].t().contiguous().to(device))
        return self._drawn[key]

    def _draw(self, name: str, what: str, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{what} of {name}".encode()))
        return torch.randint(0, 2, (count, self.sketches), generator=generator).mul_(2).sub_(1).to(torch.float64)


class _Scratch(threading.local):
    """Memory of a thread, kept: taken anew for each part it would cost more than the numbers, in page faults."""

    held: Tensor | None = None

    def widen(self, part: Tensor) -> Tensor:
        """The part in fp64, until the next one."""
        if part.device.type != "cpu" or part.numel() > AT_ONCE:
            return part.to(torch.float64)
        if self.held is None:
            self.held = torch.empty(AT_ONCE, dtype=torch.float64)
        return self.held[: part.numel()].view(part.shape).copy_(part)


_scratch = _Scratch()


@torch.no_grad()
def sketch(matrix: Tensor, rows: Tensor, columns: Tensor, *, squares: bool = True) -> Sketch:
    """Sketch a matrix [rows, columns], a part at a time, with signs [rows, m] and [m, columns].

    Args:
        squares: whether they are wanted; 0 where not.
    """
    step = max(1, AT_ONCE // max(1, matrix.shape[1]))
    values = torch.zeros(rows.shape[1], dtype=torch.float64, device=matrix.device)
    squared = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for begin in range(0, matrix.shape[0], step):
        part = _scratch.widen(matrix[begin : begin + step])
        values += ((columns @ part.t()) * rows[begin : begin + step].t()).sum(1)  # BLAS is quickest in this order
        if squares:
            flat = part.reshape(-1)
            squared += torch.dot(flat, flat)
    return Sketch(values, squared)
