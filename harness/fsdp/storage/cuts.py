"""How the tensors of one bucket are cut along the two axes: what each collective of it moves.

[Note: Two axes] Ranks form a grid, inner x outer (outer may be 1). Gradients are first summed over the inner axis, then
over the outer one; weights come back the other way. The outer axis is the slow one, so only 1/inner of a bucket ever
goes over it, whatever the strategy:

| inner strategy       | outer    | reduce: inner       | outer          | back to inner | gather: outer | inner      |
|----------------------|----------|---------------------|----------------|---------------|---------------|------------|
| no_shard             | no_shard | first leg           | all-reduce     | second leg    |               |            |
| no_shard             | optim    | first leg           | reduce-scatter | second leg    | all-gather    | all-gather |
| optim                | no_shard | reduce-scatter      | all-reduce     |               |               | all-gather |
| optim                | optim    | reduce-scatter      | reduce-scatter |               | all-gather    | all-gather |

optim_grads and optim_grads_params do as optim does: every microbatch inside, once a step outside.

The two legs of an all-reduce are a reduce-scatter over arbitrary even chunks and an all-gather. Under no_shard with
outer optim, state is split over the outer axis alone: all inner ranks of one outer rank keep the same piece of each
segment. Each of them reduces and gathers its chunk of *every* piece, so that the outer axis carries each element once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.fsdp.comm.mesh import Place
from harness.fsdp.comm.parts import Part, even_bounds
from harness.fsdp.storage.layout import BucketLayout, Segment


@dataclass(frozen=True)
class Cuts:
    """The cuts of one bucket's tensors; see [Note: Two axes].

    A *whole* tensor has the layout's `bucket_numel` elements. *Inner pieces* are this inner rank's part of it, one
    tensor a segment, wherever they lie; where the inner axis splits nothing they are the whole segments. *Own* pieces
    are what this rank alone of its outer axis keeps of them.
    """

    layout: BucketLayout
    place: Place
    splits_inner: bool
    splits_outer: bool

    @property
    def position(self) -> int:
        """This rank's place in the layout."""
        inner = self.place.inner_rank if self.splits_inner else 0
        outer = self.place.outer_rank if self.splits_outer else 0
        return inner * self.layout.outer + outer

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank is the first of those that keep the same elements."""
        first_inside = self.splits_inner or self.place.inner_rank == 0
        return first_inside and (self.splits_outer or self.place.outer_rank == 0)

    # -- pieces --------------------------------------------------------------------------------------------------

    def inner_pieces(self, whole: Tensor) -> list[Tensor]:
        """This inner rank's pieces of a whole tensor."""
        rank = self.place.inner_rank if self.splits_inner else 0
        begins = [s.bucket_offset + rank * s.inner_numel for s in self.layout.segments]
        return [whole[b : b + s.inner_numel] for b, s in zip(begins, self.layout.segments, strict=True)]

    def pieces_of_inner(self, shard: Tensor) -> list[Tensor]:
        """The inner pieces in a tensor of `inner_numel` elements that holds nothing else."""
        return [shard[s.inner_offset : s.inner_offset + s.inner_numel] for s in self.layout.segments]

    def pieces_of_own(self, shard: Tensor) -> list[Tensor]:
        """The own pieces in a tensor of `shard_numel` elements that holds nothing else."""
        return [shard[s.shard_offset : s.shard_offset + s.shard_numel] for s in self.layout.segments]

    def own(self, inner_pieces: Sequence[Tensor]) -> list[Tensor]:
        """This rank's own pieces of its inner pieces."""
        rank = self.place.outer_rank if self.splits_outer else 0
        sizes = [s.shard_numel for s in self.layout.segments]
        return [piece[rank * size : (rank + 1) * size] for piece, size in zip(inner_pieces, sizes, strict=True)]

    # -- collectives ---------------------------------------------------------------------------------------------

    def inner(self, whole: Tensor) -> list[Part]:
        """A whole tensor cut by inner rank."""
        if self.splits_inner:
            return [
                Part.at(_segment(whole, s), [rank * s.inner_numel for rank in range(self.place.inner_size + 1)])
                for s in self.layout.segments
            ]
        if not self.splits_outer:
            return [Part.evenly(whole, self.place.inner_size)]
        return [
            Part.evenly(piece, self.place.inner_size)
            for s in self.layout.segments
            for piece in _segment(whole, s).split(s.shard_numel)
        ]

    def inner_back(self, whole: Tensor) -> list[Part]:
        """What inner ranks that keep the same elements give each other of reduced gradients, cut by inner rank."""
        if not self.splits_outer:
            return self.inner(whole)
        return [Part.evenly(piece, self.place.inner_size) for piece in self.own(self.inner_pieces(whole))]

    def outer(self, pieces: Sequence[Tensor]) -> list[Part]:
        """What this inner rank has of every outer rank's elements, cut by outer rank.

        Args:
            pieces: inner pieces; where neither axis splits, any tensors.
        """
        if not self.splits_outer:
            return [Part.evenly(piece, self.place.outer_size) for piece in pieces]
        if self.splits_inner:
            return [
                Part.at(piece, [rank * s.shard_numel for rank in range(s.outer + 1)])
                for piece, s in zip(pieces, self.layout.segments, strict=True)
            ]
        parts = []
        for piece, s in zip(pieces, self.layout.segments, strict=True):
            bounds = even_bounds(s.shard_numel, self.place.inner_size)
            begin, end = bounds[self.place.inner_rank], bounds[self.place.inner_rank + 1]
            starts = [rank * s.shard_numel for rank in range(s.outer)]
            parts.append(Part(piece, tuple((start + begin, start + end) for start in starts)))
        return parts


def _segment(whole: Tensor, segment: Segment) -> Tensor:
    return whole[segment.bucket_offset : segment.bucket_offset + segment.numel]
