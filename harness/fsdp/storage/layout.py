"""Which element lies where, and which of them each collective moves: arithmetic over shapes.

docs/glossary.md defines bucket, segment, slot, shard, slice and run. Shards are even and never cut a row. One row grid
for all row lengths would pad a shard to their least common multiple: 7.7 % of a Llama-8B unit on 1,024 ranks. So a
segment is a matrix of rows of one length, with a few rows of padding. In the gathered bucket segments follow each
other; in a rank's shard, its shards of the segments do. Under hybrid sharding rank = inner rank * outer + outer rank:
an inner rank's part of a gather is one range of its segment.

[Note: Bits and cuts] Each parameter starts on a multiple of `align` elements of its segment, whatever the number of
ranks: a kernel's result cannot depend on the address. Where a row has 1 element or a multiple of 64, shards are cut at
multiples of 64 elements too: fused optimizer kernels then see whole vectors only. Other segments are not `fusable`, and
the bitwise modes step them unfused. That depends on the row length alone, never on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from harness.fsdp.comm.communicator import Cut, Part, even_cut
from harness.fsdp.comm.mesh import Place
from harness.fsdp.storage.placement import SHARD, On, Placements

FUSED_CUT = 64


@dataclass(frozen=True)
class ParamSpec:
    """A row is one index of dimension 0; a scalar is one row of one element."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return max(1, math.prod(self.shape[1:]))


@dataclass(frozen=True)
class Slot:
    spec: ParamSpec
    segment: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class Segment:
    """row_numel: elements of a row; every shard is a whole number of rows. numel, inner_numel, shard_numel: of all, a
    shard of the inner axis, a rank's shard; bucket_offset, inner_offset, shard_offset: of its start in these.
    """

    row_numel: int
    numel: int
    inner_numel: int
    shard_numel: int
    bucket_offset: int
    inner_offset: int
    shard_offset: int

    @property
    def fusable(self) -> bool:
        return _is_fusable(self.row_numel)


@dataclass(frozen=True)
class LocalSlice:
    """Elements [start, end) of the flattened parameter, at `offset` into the rank's shard."""

    segment: int
    offset: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    def of(self, shards: Sequence[Any]) -> Any:
        """These elements of a rank's shards, a tensor a segment."""
        return shards[self.segment][self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class BucketLayout:
    """slots: in the order of the parameters. bucket_numel, inner_numel, shard_numel: elements of the gathered bucket, a
    shard of the inner axis, a rank's shard, with padding."""

    segments: tuple[Segment, ...]
    slots: tuple[Slot, ...]
    outer: int
    bucket_numel: int
    inner_numel: int
    shard_numel: int

    @cached_property
    def comm_numel(self) -> int:
        return sum(s.numel for s in self.segments)

    @cached_property
    def param_numel(self) -> int:
        return sum(slot.spec.numel for slot in self.slots)

    def bucket_range(self, slot: Slot) -> tuple[int, int]:
        base = self.segments[slot.segment].bucket_offset
        return base + slot.offset, base + slot.end

    @cached_property
    def views(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        return tuple(
            (slot.spec.shape, _contiguous_strides(slot.spec.shape), self.bucket_range(slot)[0]) for slot in self.slots
        )

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        edges = sorted(self.bucket_range(slot) for slot in self.slots)
        begins = [0, *(end for _, end in edges)]
        ends = [*(begin for begin, _ in edges), self.bucket_numel]
        return tuple((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)

    def local_slice(self, slot: Slot, rank: int) -> LocalSlice:
        return _within(slot, self.segments[slot.segment].shard_numel, rank)

    def inner_slice(self, slot: Slot, inner_rank: int) -> LocalSlice:
        return _within(slot, self.segments[slot.segment].inner_numel, inner_rank)

    def param_numel_on(self, rank: int) -> int:
        return sum(self.local_slice(slot, rank).numel for slot in self.slots)


def _within(slot: Slot, size: int, rank: int) -> LocalSlice:
    low, high = rank * size, (rank + 1) * size
    start, end = max(slot.offset, low), min(slot.end, high)
    if start >= end:
        return LocalSlice(slot.segment, 0, 0, 0)
    return LocalSlice(slot.segment, start - low, start - slot.offset, end - slot.offset)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def plan_bucket(params: Sequence[ParamSpec], num_ranks: int, align: int, outer: int = 1) -> BucketLayout:
    """A function of the arguments alone: every rank makes the same plan.

    Args:
        params: names and shapes; names are unique.
        align: elements between parameter starts.
        outer: ranks that share a shard of the inner axis; divides num_ranks.
    """
    by_length: dict[int, list[ParamSpec]] = {}
    for spec in params:
        by_length.setdefault(spec.row_numel, []).append(spec)
    segments: list[Segment] = []
    slots: dict[str, Slot] = {}
    bucket_offset = inner_offset = shard_offset = 0
    for row_numel, members in by_length.items():
        end, step = 0, math.lcm(align, row_numel)
        for spec in members:
            slots[spec.name] = slot = Slot(spec, len(segments), round_up(end, step))
            end = slot.end
        shard_numel = _shard_numel(end, row_numel, num_ranks)
        numels = shard_numel * num_ranks, shard_numel * outer, shard_numel
        segments.append(Segment(row_numel, *numels, bucket_offset, inner_offset, shard_offset))
        bucket_offset += round_up(numels[0], align)
        inner_offset += round_up(numels[1], align)
        shard_offset += round_up(shard_numel, align)
    ordered = tuple(slots[spec.name] for spec in params)
    return BucketLayout(tuple(segments), ordered, outer, bucket_offset, inner_offset, shard_offset)


def _shard_numel(numel: int, row_numel: int, num_ranks: int) -> int:
    rows = -(-numel // (row_numel * num_ranks))
    if num_ranks > 1 and _is_fusable(row_numel):
        rows = round_up(rows, math.lcm(FUSED_CUT, row_numel) // row_numel)
    return rows * row_numel


def _is_fusable(row_numel: int) -> bool:
    return row_numel == 1 or row_numel % FUSED_CUT == 0


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Cuts:
    """Cuts of one bucket's tensors on this rank.

    [Note: Placement] and [Note: Outer once] say which collectives there are. The legs of an all-reduce are a
    reduce-scatter over even chunks and an all-gather. Where only the outer axis splits the main weights, inner ranks of
    one outer rank keep the same shard of each segment. Each of them reduces and gathers its chunk of *every* shard.

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

    # -- tensors by placement ------------------------------------------------------------------------------------

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

    # -- shards --------------------------------------------------------------------------------------------------

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

    # -- collectives ---------------------------------------------------------------------------------------------

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
