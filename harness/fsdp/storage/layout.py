"""Which element lies where: pure arithmetic over shapes, no tensors, no torch.

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
from itertools import pairwise
from typing import Any

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
        ranges = [(0, 0), *sorted(map(self.bucket_range, self.slots)), (self.bucket_numel, self.bucket_numel)]
        return tuple((end, begin) for (_, end), (begin, _) in pairwise(ranges) if end < begin)

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
