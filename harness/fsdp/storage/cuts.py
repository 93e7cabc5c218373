"""Cuts of one bucket's tensors along both axes: the elements that each of its collectives moves.

[Note: Placement] and [Note: Outer once] say which collectives there are. The legs of an all-reduce are a reduce-scatter
over even chunks and an all-gather. Where only the outer axis splits the main weights, inner ranks of one outer rank
keep the same shard of each segment. Each of them reduces and gathers its chunk of *every* shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from harness.fsdp.comm.communicator import Cut, Part, even_cut
from harness.fsdp.comm.mesh import Place
from harness.fsdp.storage.layout import BucketLayout, LocalSlice, ParamSpec, Slot, plan_bucket
from harness.fsdp.storage.placement import SHARD, On, Placements


@dataclass(frozen=True)
class Cuts:
    """Cuts of one bucket's tensors on this rank.

    A tensor is *whole* (`bucket_numel` elements), *inner*: this inner rank's shard (`inner_numel`), or *own*: this
    rank's shard of the main weights (`shard_numel`). Shards are listed by segment. `own` says how main weights lie; an
    axis that does not shard them counts as one rank.
    """

    layout: BucketLayout
    place: Place
    own: On

    @classmethod
    def plan(cls, specs: Sequence[ParamSpec], place: Place, placements: Placements, align: int) -> Cuts:
        own = placements.main_weights
        outer = place.outer_size if own.outer is SHARD else 1
        inner = place.inner_size if own.inner is SHARD else 1
        return cls(plan_bucket(specs, inner * outer, align, outer), place, own)

    @cached_property
    def inner_index(self) -> int:
        return self.place.inner_rank if self.own.inner is SHARD else 0

    @cached_property
    def outer_index(self) -> int:
        return self.place.outer_rank if self.own.outer is SHARD else 0

    @property
    def layout_rank(self) -> int:
        return self.inner_index * self.layout.outer + self.outer_index

    @property
    def is_counted_here(self) -> bool:
        return (self.inner_index, self.outer_index) == (self.place.inner_rank, self.place.outer_rank)

    def numel(self, on: On) -> int:
        if on == self.own:
            return self.layout.shard_numel
        return self.layout.inner_numel if on.inner is SHARD else self.layout.bucket_numel

    def param_numel(self, on: On) -> int:
        if on == self.own:
            return self.layout.param_numel_on(self.layout_rank)
        if on.inner is SHARD:
            return sum(self.inner_slice(slot).numel for slot in self.layout.slots)
        return self.layout.param_numel

    def own_slice(self, slot: Slot) -> LocalSlice:
        return self.layout.local_slice(slot, self.layout_rank)

    def inner_slice(self, slot: Slot) -> LocalSlice:
        return self.layout.inner_slice(slot, self.inner_index)

    def inner_shards_of(self, tensor: Tensor, on: On) -> list[Tensor]:
        if on.inner is not SHARD:
            return self.inner_shards(tensor)
        return [tensor.narrow(0, s.inner_offset, s.inner_numel) for s in self.layout.segments]

    def inner_shards(self, whole: Tensor) -> list[Tensor]:
        begins = [s.bucket_offset + self.inner_index * s.inner_numel for s in self.layout.segments]
        return [whole.narrow(0, b, s.inner_numel) for b, s in zip(begins, self.layout.segments, strict=True)]

    def split_own(self, shard: Tensor) -> list[Tensor]:
        return [shard.narrow(0, s.shard_offset, s.shard_numel) for s in self.layout.segments]

    def own_shards(self, inner_shards: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(inner_shards, self.layout.segments, strict=True)
        return [shard.narrow(0, self.outer_index * s.shard_numel, s.shard_numel) for shard, s in pairs]

    def own_rows(self, own_shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        return [(slot.spec.name, self.own_slice(slot).of(own_shards)) for slot in self.layout.slots]

    def inner_parts(self, whole: Tensor) -> list[Part]:
        size, segments = self.place.inner_size, self.layout.segments
        if SHARD not in self.own:
            return [Part.evenly(whole, size)]
        if self.own.inner is SHARD:
            return [Part(whole.narrow(0, s.bucket_offset, s.numel), even_cut(s.numel, size)) for s in segments]
        split = [whole.narrow(0, s.bucket_offset, s.numel).split(s.shard_numel) for s in segments]
        return [Part.evenly(shard, size) for shards in split for shard in shards]

    def second_leg_parts(self, whole: Tensor) -> list[Part]:
        if self.own.outer is not SHARD:
            return self.inner_parts(whole)
        return [Part.evenly(shard, self.place.inner_size) for shard in self.own_shards(self.inner_shards(whole))]

    def outer_parts(self, shards: Sequence[Tensor]) -> list[Part]:
        if self.own.outer is not SHARD:
            return [Part.evenly(shard, self.place.outer_size) for shard in shards]
        return [Part(shard, cut) for shard, cut in zip(shards, self._outer_cuts, strict=True)]

    @cached_property
    def _outer_cuts(self) -> list[Cut]:
        """By segment: chunks of outer ranks, of the shard where the inner axis splits, else of this rank's chunk."""
        pieces, piece = (1, 0) if self.own.inner is SHARD else (self.place.inner_size, self.place.inner_rank)
        found = []
        for size in (s.shard_numel for s in self.layout.segments):
            begin, end = even_cut(size, pieces).spans[piece]
            found.append(Cut((rank * size + begin, rank * size + end) for rank in range(self.layout.outer)))
        return found
