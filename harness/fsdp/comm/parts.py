"""A flat tensor cut by owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Cut:
    """Where the chunks of a flat tensor lie, one for each rank.

    Every collective of a step asks what holds of all chunks, and there may be thousands: it is found once, as whoever
    cuts the same tensor again keeps its cut.

    Args:
        spans: of each rank's chunk, begin and end (elements).
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = tuple(spans)

    @classmethod
    def at(cls, bounds: Sequence[int]) -> Cut:
        """Chunks that lie one after another: rank r's is `bounds[r] .. bounds[r + 1]`."""
        return cls(pairwise(bounds))

    @cached_property
    def sizes(self) -> list[int]:
        return [end - begin for begin, end in self.spans]

    @cached_property
    def closed_up(self) -> Cut:
        """Chunks of the same lengths that lie one after another, from 0 on."""
        return Cut.at([0, *accumulate(self.sizes)])

    @cached_property
    def longest(self) -> int:
        return max(self.sizes)

    @cached_property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    @cached_property
    def covers(self) -> tuple[int, int] | None:
        """Begin and end of all chunks together; None where they do not lie one after another."""
        if any(one[1] != following[0] for one, following in pairwise(self.spans)):
            return None
        return self.spans[0][0], self.spans[-1][1]

    @cached_property
    def is_short_at_end(self) -> bool:
        """True if chunks lie one after another and only the last ones are shorter, if any."""
        return self.covers is not None and self.sizes == even_cut(sum(self.sizes), len(self.sizes)).sizes

    @cached_property
    def spacing(self) -> int | None:
        """How far each chunk begins behind the one before it, where all have one length; None where they differ."""
        begins = [begin for begin, _ in self.spans]
        found = {after - before for before, after in pairwise(begins)} or {self.longest}
        return found.pop() if self.is_even and len(found) == 1 else None


class Part(NamedTuple):
    tensor: Tensor
    cut: Cut

    @classmethod
    def evenly(cls, tensor: Tensor, size: int) -> Part:
        """Cut into chunks of equal length, the last ones shorter where it does not divide."""
        return cls(tensor, even_cut(tensor.numel(), size))

    @property
    def sizes(self) -> list[int]:
        return self.cut.sizes

    @property
    def longest(self) -> int:
        """Bytes of the longest chunk: the same on all ranks, whichever chunk is theirs."""
        return self.cut.longest * self.tensor.itemsize

    @property
    def covered(self) -> Tensor | None:
        """All chunks as one tensor, a view; None where they do not lie one after another."""
        covers = self.cut.covers
        return None if covers is None else self.tensor[covers[0] : covers[1]]

    @property
    def rows(self) -> Tensor | None:
        """All chunks as a matrix of a row a rank, a view; None where they are not alike and evenly spaced."""
        spacing, begin = self.cut.spacing, self.cut.spans[0][0]
        if spacing is None:
            return None
        shape = len(self.sizes), self.cut.longest
        return self.tensor.as_strided(shape, (spacing, 1), self.tensor.storage_offset() + begin)

    @property
    def closed_up(self) -> Tensor:
        """All chunks as one contiguous tensor: a view, or a copy where they lie apart."""
        if self.covered is not None:
            return self.covered
        rows = self.rows
        return (
            rows.reshape(-1) if rows is not None else torch.cat([self.chunk(rank) for rank in range(len(self.sizes))])
        )

    def chunk(self, rank: int) -> Tensor:
        begin, end = self.cut.spans[rank]
        return self.tensor[begin:end]


@cache
def even_cut(numel: int, size: int) -> Cut:
    """`size` chunks of equal length of `numel` elements, the last ones shorter where it does not divide."""
    step = -(-numel // size)
    return Cut.at([min(rank * step, numel) for rank in range(size + 1)])


class Evened:
    """A part as one tensor of equal chunks: a view, or, where chunks lie apart or the last ones are shorter, memory of
    its own to be copied into or from.

    [Note: Equal chunks] NCCL's collectives move equal chunks that lie one after another. torch makes those of others of
    one call a rank, or of one copy a rank, which takes hundreds of them where there are hundreds of ranks. One copy
    costs less.
    """

    def __init__(self, part: Part) -> None:
        size, self._given = len(part.sizes), part
        whole = part.covered if part.cut.is_even else None
        self.is_copy = whole is None
        self.part = Part.evenly(part.tensor.new_empty(part.cut.longest * size) if whole is None else whole, size)

    @staticmethod
    def fits(parts: Sequence[Part]) -> bool:
        return all(part.cut.is_short_at_end or part.cut.spacing is not None for part in parts)

    @classmethod
    def all_of(cls, parts: Sequence[Part]) -> list[Evened] | None:
        """Each of the parts; None where they do not fit."""
        return [cls(part) for part in parts] if cls.fits(parts) else None

    def copy_in(self, rank: int | None = None) -> None:
        """Copy all chunks, or a rank's, to where the collective has them."""
        if self.is_copy:
            given, own = self._both(rank)
            own.copy_(given)

    def copy_back(self, rank: int | None = None) -> None:
        """Copy all chunks, or a rank's, from where the collective has them."""
        if self.is_copy:
            given, own = self._both(rank)
            given.copy_(own)

    def _both(self, rank: int | None) -> tuple[Tensor, Tensor]:
        given = self._given
        if rank is not None:
            chunk = given.chunk(rank)
            return chunk, self.part.chunk(rank)[: chunk.numel()]
        if given.covered is not None:
            return given.covered, self.part.tensor[: given.covered.numel()]
        assert given.rows is not None
        return given.rows, self.part.tensor.view(given.rows.shape)


def joined(parts: Sequence[Part]) -> Cut:
    return Cut.at([0, *accumulate(sum(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True))])
