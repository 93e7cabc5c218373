"""A flat tensor cut by owner, and the packing of several small ones into one message a peer.

[Note: Small messages] On gloo a message costs some 100 us whatever its size, and a bucket is a few segments. Where all
that goes to a peer is small, the segments are packed into one staging buffer, owner by owner. Large buckets are never
copied: their segments travel from and into the flat storage itself. What is summed, and in which order, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

PACK_BYTES = 1 << 16
"""Most bytes of one rank's chunks together that are packed."""


class Part(NamedTuple):
    """A flat tensor cut into one chunk a rank: `spans[r]` is the range of rank r's, begin and end."""

    tensor: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def at(cls, tensor: Tensor, bounds: Sequence[int]) -> Part:
        """Cut into chunks that lie one after another: rank r's is `bounds[r] .. bounds[r + 1]`."""
        return cls(tensor, tuple(pairwise(bounds)))

    @classmethod
    def evenly(cls, tensor: Tensor, size: int) -> Part:
        """Cut into chunks of equal length, the last ones shorter where it does not divide."""
        return cls.at(tensor, even_bounds(tensor.numel(), size))

    @property
    def sizes(self) -> list[int]:
        """Length of each rank's chunk."""
        return _lengths(self.spans)

    @property
    def longest(self) -> int:
        """Bytes of the longest chunk: the same on all ranks, whichever chunk is theirs."""
        return max(_lengths(self.spans)) * self.tensor.itemsize

    @property
    def even(self) -> bool:
        """Whether all chunks have one length."""
        return len(set(self.sizes)) == 1

    @property
    def covered(self) -> Tensor | None:
        """All chunks as one tensor, a view; None where they do not lie one after another."""
        if any(one[1] != following[0] for one, following in pairwise(self.spans)):
            return None
        return self.tensor[self.spans[0][0] : self.spans[-1][1]]

    def chunk(self, rank: int) -> Tensor:
        """A rank's chunk, a view."""
        begin, end = self.spans[rank]
        return self.tensor[begin:end]


@cache
def _lengths(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [end - begin for begin, end in spans]


@cache
def even_bounds(numel: int, size: int) -> tuple[int, ...]:
    """Where `size` chunks of equal length begin and end in `numel` elements; the last ones may be shorter."""
    step = -(-numel // size)
    return tuple(min(rank * step, numel) for rank in range(size + 1))


def evenly_covered(parts: Sequence[Part]) -> list[Tensor] | None:
    """Each part as one tensor of equal chunks; None where one of them is not that."""
    covered = [part.covered for part in parts if part.even]
    found = [each for each in covered if each is not None]
    return found if len(found) == len(parts) else None


def worth_packing(parts: Sequence[Part]) -> bool:
    """Whether to send one message a peer; the same on all ranks."""
    return len(parts) > 1 and sum([part.longest for part in parts]) <= PACK_BYTES


def packed(parts: Sequence[Part], ranks: Sequence[int]) -> Part:
    """One part holding the chunks of all, owner by owner; only the chunks of `ranks` are copied in."""
    lengths = [sum(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True)]
    bounds = (0, *accumulate(lengths))
    whole = Part.at(parts[0].tensor.new_empty(bounds[-1]), bounds)
    for rank in ranks:
        torch.cat([part.chunk(rank) for part in parts], out=whole.chunk(rank))
    return whole


def unpack(whole: Part, parts: Sequence[Part], ranks: Sequence[int]) -> None:
    """Copy the chunks of `ranks` from a packed part back to the parts it was packed from."""
    for rank in ranks:
        targets = [part.chunk(rank) for part in parts]
        for target, source in zip(targets, whole.chunk(rank).split([t.numel() for t in targets]), strict=True):
            target.copy_(source)
