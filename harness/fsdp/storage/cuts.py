"""How the tensors of one bucket are cut along the two axes: what each collective of it moves.

Which collectives there are is said in [Note: Placement] and [Note: Outer once]; here is which elements each moves. The
two legs of an all-reduce are a reduce-scatter over arbitrary even chunks and an all-gather. Where only the outer axis
splits the main weights, all inner ranks of one outer rank keep the same shard of each segment, and each of them reduces
and gathers its chunk of *every* shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from harness.fsdp.comm.mesh import Place
from harness.fsdp.comm.parts import Cut, Part, even_cut
from harness.fsdp.storage.layout import BucketLayout, LocalSlice, ParamSpec, Slot, plan_bucket
from harness.fsdp.storage.placement import SHARD, On, Placements


@dataclass(frozen=True)
class Cuts:
    """The cuts of one bucket's tensors on this rank.

    A tensor of a bucket is *whole* (the layout's `bucket_numel` elements), *inner*: this inner rank's shard
    (`inner_numel`), or *own*: this rank's shard of the main weights (`shard_numel`). Shards are listed by segment.
    `own` says how main weights lie; an axis that does not shard them counts as one of a single rank.
    """

    layout: BucketLayout
    place: Place
    own: On

    @classmethod
    def plan(cls, specs: Sequence[ParamSpec], place: Place, placements: Placements, align: int) -> Cuts:
        """Lay parameters out over the ranks that split them; `align`: elements between parameter starts."""
        own = placements.main_weights
        outer = place.outer_size if own.outer is SHARD else 1
        inner = place.inner_size if own.inner is SHARD else 1
        return cls(plan_bucket(specs, inner * outer, align, outer), place, own)

    @cached_property
    def inner_index(self) -> int:
        """This rank's shard of the inner axis; 0 where that has but one."""
        return self.place.inner_rank if self.own.inner is SHARD else 0

    @cached_property
    def outer_index(self) -> int:
        """This rank's part of its inner shard; 0 where that has but one."""
        return self.place.outer_rank if self.own.outer is SHARD else 0

    @property
    def layout_rank(self) -> int:
        """This rank's number in the layout."""
        return self.inner_index * self.layout.outer + self.outer_index

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank is the first of those that keep the same elements."""
        return (self.inner_index, self.outer_index) == (self.place.inner_rank, self.place.outer_rank)

    # -- tensors by placement ------------------------------------------------------------------------------------

    def numel(self, on: On) -> int:
        """Elements of a tensor that lies so, padding included."""
        if on == self.own:
            return self.layout.shard_numel
        return self.layout.inner_numel if on.inner is SHARD else self.layout.bucket_numel

    def param_numel(self, on: On) -> int:
        """Elements of parameters in it, padding left out."""
        if on == self.own:
            return self.layout.param_numel_on(self.layout_rank)
        if on.inner is SHARD:
            return sum(self.inner_slice(slot).numel for slot in self.layout.slots)
        return self.layout.param_numel

    def inner_slice(self, slot: Slot) -> LocalSlice:
        """What this inner rank keeps of a parameter; its offset is within the inner shard."""
        return self.layout.inner_slice(slot, self.inner_index)

    # -- shards --------------------------------------------------------------------------------------------------

    def inner_shards_of(self, tensor: Tensor, on: On) -> list[Tensor]:
        """The inner shard in a tensor that lies so, whole or as that shard alone, by segment."""
        return self.split_inner(tensor) if on.inner is SHARD else self.inner_shards(tensor)

    def inner_shards(self, whole: Tensor) -> list[Tensor]:
        """The inner shard in a whole tensor, by segment."""
        begins = [s.bucket_offset + self.inner_index * s.inner_numel for s in self.layout.segments]
        return [whole[b : b + s.inner_numel] for b, s in zip(begins, self.layout.segments, strict=True)]

    def split_inner(self, shard: Tensor) -> list[Tensor]:
        """An inner shard, a tensor of `inner_numel` elements, by segment."""
        return [shard[s.inner_offset : s.inner_offset + s.inner_numel] for s in self.layout.segments]

    def split_own(self, shard: Tensor) -> list[Tensor]:
        """An own shard, a tensor of `shard_numel` elements, by segment."""
        return [shard[s.shard_offset : s.shard_offset + s.shard_numel] for s in self.layout.segments]

    def own_shards(self, inner_shards: Sequence[Tensor]) -> list[Tensor]:
        """This rank's own shard in its inner one, both by segment."""
        sizes = [s.shard_numel for s in self.layout.segments]
        begins = [self.outer_index * size for size in sizes]
        return [shard[b : b + size] for shard, b, size in zip(inner_shards, begins, sizes, strict=True)]

    # -- collectives ---------------------------------------------------------------------------------------------

    def inner_parts(self, whole: Tensor) -> list[Part]:
        """A whole tensor cut by inner rank."""
        size = self.place.inner_size
        if self.own.inner is SHARD:
            return [Part(whole[begin:end], cut) for begin, end, cut in self._inner_cuts]
        if SHARD not in self.own:
            return [Part.evenly(whole, size)]
        segments = [(whole[s.bucket_offset : s.bucket_offset + s.numel], s) for s in self.layout.segments]
        shards = [shard for segment, s in segments for shard in segment.split(s.shard_numel)]
        return [Part.evenly(shard, size) for shard in shards]

    @cached_property
    def _inner_cuts(self) -> list[tuple[int, int, Cut]]:
        """By segment: where it begins and ends in a whole tensor, and each inner rank's shard in it."""
        ranks = range(self.place.inner_size + 1)
        return [
            (s.bucket_offset, s.bucket_offset + s.numel, Cut.at([rank * s.inner_numel for rank in ranks]))
            for s in self.layout.segments
        ]

    def second_leg_parts(self, whole: Tensor) -> list[Part]:
        """What inner ranks that keep the same elements give each other of reduced gradients, cut by inner rank."""
        if self.own.outer is not SHARD:
            return self.inner_parts(whole)
        return [Part.evenly(shard, self.place.inner_size) for shard in self.own_shards(self.inner_shards(whole))]

    def outer_parts(self, shards: Sequence[Tensor]) -> list[Part]:
        """What this inner rank has of every outer rank's elements, cut by outer rank.

        Args:
            shards: inner shards; where neither axis splits, any tensors.
        """
        if self.own.outer is not SHARD:
            return [Part.evenly(shard, self.place.outer_size) for shard in shards]
        return [Part(shard, cut) for shard, cut in zip(shards, self._outer_cuts, strict=True)]

    @cached_property
    def _outer_cuts(self) -> list[Cut]:
        """By segment: each outer rank's chunk on the outer axis, of the whole shard where the inner axis splits, else
        of this rank's chunk of every shard."""
        found = []
        for segment in self.layout.segments:
            begin, end = 0, segment.shard_numel
            if self.own.inner is not SHARD:
                begin, end = even_cut(segment.shard_numel, self.place.inner_size).spans[self.place.inner_rank]
            starts = [rank * segment.shard_numel for rank in range(segment.outer)]
            found.append(Cut((start + begin, start + end) for start in starts))
        return found
