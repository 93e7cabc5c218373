"""Which element lies where: pure arithmetic over shapes, no tensors, no torch.

[Note: Six nouns] Each has one meaning, here and in docs/glossary.md:

| noun    | meaning                                                                                 | here            |
|---------|-----------------------------------------------------------------------------------------|-----------------|
| bucket  | the flat buffer of one unit's parameters of one dtype; unsharded, it holds all of them  | `BucketLayout`  |
| segment | a range of the bucket whose parameters share one row length                             | `Segment`       |
| slot    | where one parameter lies: a range of its segment                                        | `Slot`          |
| shard   | what one rank keeps: of a segment one range, of a bucket those of all segments in order | `Segment.shard` |
| slice   | what one rank keeps of one parameter: a range of its shard                              | `LocalSlice`    |
| stretch | a range of a shard that one optimizer group updates                                     | `Stretch`       |

[Note: Segments] A bucket is cut into even shards without ever cutting a row of a parameter. Forcing one row grid on
parameters of different row lengths would pad the shard to a multiple of their least common multiple (7.7 % for a
Llama-8B unit on 1,024 ranks). So a bucket is a few *segments*, one for each row length; a segment is a matrix of rows,
every rank holds the same number of them, and padding is at most a few rows a segment. In the gathered bucket segments
lie one after the other; in a rank's shard, its shards of the segments do.

[Note: Bits and cuts] Each parameter starts on a multiple of `align` elements of its segment, whatever the number of
ranks, so that a kernel's result cannot depend on the address. Where the length of a row allows it without real cost
(1, or a multiple of 64), shards are cut at multiples of 64 elements too: fused optimizer kernels then see whole vectors
only. Other segments are marked `fusable = False`, and the bitwise modes step them unfused. The mark depends on the
length of a row alone, never on the number of ranks.

[Note: Inner-major] Under hybrid sharding a shard of the inner axis is split once more over the outer axis. Ranks are
numbered with the outer axis running fastest, so that what one inner rank gives to a gather is one range of its segment:
rank = inner rank * outer + outer rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

FUSED_CUT = 64
"""Elements; fused optimizer kernels give the same bits when cut at multiples of this."""


@dataclass(frozen=True)
class ParamSpec:
    """Name and shape of a parameter. A row is one index of dimension 0; a scalar is one row of one element."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements in a row (at least 1, so that empty parameters have a place)."""
        return max(1, math.prod(self.shape[1:]))

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 for an empty parameter."""
        return self.numel // self.row_numel


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: `offset` elements into its segment, `numel` long."""

    spec: ParamSpec
    segment: int
    offset: int

    @property
    def end(self) -> int:
        """First element of the segment after this parameter."""
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class Segment:
    """Parameters of one row length, and where ranks are cut.

    row_numel: elements of a row; every shard is a whole number of rows.
    shard_numel: elements of a rank's shard, the same on every rank.
    num_ranks: ranks the segment is cut over.
    bucket_offset, inner_offset, shard_offset: where it starts in the gathered bucket, in a shard of the inner axis, and
        in a rank's shard (elements).
    outer: shards that lie together in a shard of the inner axis.
    """

    row_numel: int
    shard_numel: int
    num_ranks: int
    bucket_offset: int
    inner_offset: int
    shard_offset: int
    outer: int = 1

    @property
    def numel(self) -> int:
        """Elements over all ranks, padding included."""
        return self.shard_numel * self.num_ranks

    @cached_property
    def inner_numel(self) -> int:
        """Elements of a shard of the inner axis, the same on every inner rank."""
        return self.shard_numel * self.outer

    @property
    def fusable(self) -> bool:
        """Whether fused optimizer kernels may step it in the bitwise modes; see [Note: Bits and cuts]."""
        return _is_fusable(self.row_numel)

    def shard(self, rank: int) -> tuple[int, int]:
        """Start and end of a rank's shard within the segment."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def inner_shard(self, inner_rank: int) -> tuple[int, int]:
        """Start and end of a shard of the inner axis within the segment."""
        return inner_rank * self.inner_numel, (inner_rank + 1) * self.inner_numel


@dataclass(frozen=True)
class LocalSlice:
    """The part of one parameter that one rank holds.

    Elements [start, end) of the flattened parameter, at `offset` elements into the rank's shard of `segment`.
    """

    segment: int
    offset: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements; 0 where the rank holds none."""
        return self.end - self.start


@dataclass(frozen=True)
class Stretch:
    """Elements [start, end) of a rank's shard of `segment` that one optimizer group updates."""

    group: int
    segment: int
    start: int
    end: int


@dataclass(frozen=True)
class BucketLayout:
    """Slots of all parameters of a bucket over `num_ranks` ranks, `outer` of which share a shard of the inner axis.

    align: elements; every parameter and segment starts on a multiple of it. slots: in the order the parameters were
    given.
    """

    num_ranks: int
    align: int
    segments: tuple[Segment, ...]
    slots: tuple[Slot, ...]
    outer: int = 1

    @cached_property
    def bucket_numel(self) -> int:
        """Elements of the gathered bucket, padding included."""
        return sum(round_up(s.numel, self.align) for s in self.segments)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a rank's shard, padding included, the same on every rank."""
        return sum(round_up(s.shard_numel, self.align) for s in self.segments)

    @cached_property
    def inner_numel(self) -> int:
        """Elements of a shard of the inner axis, padding included."""
        return sum(round_up(s.inner_numel, self.align) for s in self.segments)

    @cached_property
    def comm_numel(self) -> int:
        """Elements a full gather moves over all ranks: the segments without the gaps between them."""
        return sum(s.numel for s in self.segments)

    @cached_property
    def param_numel(self) -> int:
        """Elements of the parameters alone."""
        return sum(slot.spec.numel for slot in self.slots)

    def bucket_range(self, slot: Slot) -> tuple[int, int]:
        """Start and end of a parameter in the gathered bucket."""
        base = self.segments[slot.segment].bucket_offset
        return base + slot.offset, base + slot.end

    @cached_property
    def views(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides and start of every parameter in the gathered bucket, in the order of the slots."""
        return tuple(
            (slot.spec.shape, contiguous_strides(slot.spec.shape), self.bucket_range(slot)[0]) for slot in self.slots
        )

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the gathered bucket that belong to no parameter, in order."""
        edges = sorted(self.bucket_range(slot) for slot in self.slots)
        begins = [0, *(end for _, end in edges)]
        ends = [*(begin for begin, _ in edges), self.bucket_numel]
        return tuple((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)

    def local_slice(self, slot: Slot, rank: int) -> LocalSlice:
        """The rows of a parameter that a rank holds."""
        return _within(slot, self.segments[slot.segment].shard(rank))

    def inner_slice(self, slot: Slot, inner_rank: int) -> LocalSlice:
        """What a shard of the inner axis holds of a parameter; `offset` is within that shard."""
        return _within(slot, self.segments[slot.segment].inner_shard(inner_rank))

    def param_numel_on(self, rank: int) -> int:
        """Elements of parameters that a rank's shard holds, padding left out."""
        return sum(self.local_slice(slot, rank).numel for slot in self.slots)

    def stretches(self, rank: int, group_of: Mapping[str, int]) -> list[Stretch]:
        """Ranges of a rank's shard by optimizer group, as few as there can be.

        A stretch has the padding after its last parameter too, so that it ends on a cut (see [Note: Bits and cuts]).
        Parameters without an entry in `group_of` are left out.
        """
        stretches: list[Stretch] = []
        for index, segment in enumerate(self.segments):
            low, high = segment.shard(rank)
            slots = [slot for slot in self._in_order if slot.segment == index and slot.spec.numel]
            for slot, after in zip_longest(slots, slots[1:]):
                until = after.offset if after is not None else segment.numel
                group = group_of.get(slot.spec.name)
                start, end = max(slot.offset, low) - low, min(until, high) - low
                if group is not None and start < end:
                    _extend(stretches, Stretch(group, index, start, end))
        return stretches

    def slots_in(self, rank: int, stretch: Stretch) -> list[Slot]:
        """Slots with rows in a range of a rank's shard, in order."""
        low, _ = self.segments[stretch.segment].shard(rank)
        begin, end = low + stretch.start, low + stretch.end
        return [s for s in self._in_order if s.segment == stretch.segment and s.offset < end and s.end > begin]

    @cached_property
    def _in_order(self) -> list[Slot]:
        """Slots as they lie in their segments."""
        return sorted(self.slots, key=lambda slot: slot.offset)


def _within(slot: Slot, shard: tuple[int, int]) -> LocalSlice:
    """What lies of a parameter in a range of its segment."""
    low, high = shard
    start, end = max(slot.offset, low), min(slot.end, high)
    if start >= end:
        return LocalSlice(slot.segment, 0, 0, 0)
    return LocalSlice(slot.segment, start - low, start - slot.offset, end - slot.offset)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _extend(stretches: list[Stretch], stretch: Stretch) -> None:
    """Append a stretch, or lengthen the last one where it goes on."""
    last = stretches[-1] if stretches else None
    if last is not None and (last.group, last.segment, last.end) == (stretch.group, stretch.segment, stretch.start):
        stretches[-1] = Stretch(stretch.group, stretch.segment, last.start, stretch.end)
    else:
        stretches.append(stretch)


def plan_bucket(params: Sequence[ParamSpec], num_ranks: int, align: int, outer: int = 1) -> BucketLayout:
    """Lay parameters out over ranks; segments in order of first appearance, parameters within one in the order given.

    The plan is a function of the arguments alone: every rank makes the same one.

    Args:
        params: names and shapes; names are unique.
        num_ranks: ranks of the sharding group, at least 1.
        align: elements; every parameter starts on a multiple of it.
        outer: how many of the ranks share a shard of the inner axis (see [Note: Inner-major]); divides num_ranks.

    Raises:
        ValueError: num_ranks, align or outer is below 1, outer does not divide num_ranks, or a name comes twice.
    """
    _check(params, num_ranks, align, outer)
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
        segment = Segment(row_numel, shard_numel, num_ranks, bucket_offset, inner_offset, shard_offset, outer)
        segments.append(segment)
        bucket_offset += round_up(segment.numel, align)
        inner_offset += round_up(segment.inner_numel, align)
        shard_offset += round_up(shard_numel, align)
    return BucketLayout(num_ranks, align, tuple(segments), tuple(slots[p.name] for p in params), outer)


def _check(params: Sequence[ParamSpec], num_ranks: int, align: int, outer: int) -> None:
    if num_ranks < 1 or align < 1 or outer < 1 or num_ranks % outer:
        raise ValueError(
            f"num_ranks={num_ranks}, align={align}, outer={outer}: at least 1, outer a divisor of num_ranks"
        )
    names = [p.name for p in params]
    if len(set(names)) != len(names):
        raise ValueError(f"parameter names must be unique: {sorted({n for n in names if names.count(n) > 1})}")


def _shard_numel(numel: int, row_numel: int, num_ranks: int) -> int:
    """Elements of a shard."""
    rows = -(-numel // (row_numel * num_ranks))
    if num_ranks > 1 and _is_fusable(row_numel):
        rows = round_up(rows, math.lcm(FUSED_CUT, row_numel) // row_numel)
    return rows * row_numel


def _is_fusable(row_numel: int) -> bool:
    return row_numel == 1 or row_numel % FUSED_CUT == 0


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step
