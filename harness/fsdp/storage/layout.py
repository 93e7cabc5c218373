"""Which element lies where: pure arithmetic over shapes, no tensors, no torch.

[Note: Segments] A bucket is cut into even shards without ever cutting a row of a parameter. Forcing one row grid on
parameters of different row lengths would pad the shard to a multiple of their least common multiple (7.7 % for a
Llama-8B unit on 1,024 ranks). So a bucket is a few *segments*, one for each row length; a segment is a matrix of rows,
every rank holds the same number of them, and padding is at most a few rows a segment. In the gathered bucket segments
lie one after the other; in a rank's shard, its pieces of the segments do.

[Note: Bits and cuts] Each parameter starts on a multiple of `align` elements of its segment, whatever the number of
ranks, so that a kernel's result cannot depend on the address. Where a row length allows it without real cost (1, or a
multiple of 64), shards are cut at multiples of 64 elements too: fused optimizer kernels then see whole vectors only.
Other segments are marked `fusable = False`, and the bitwise modes step them unfused. The mark depends on the row length
alone, never on the number of ranks.

[Note: Inner-major] Under hybrid sharding a shard of the inner axis is split once more over the outer axis. Places are
numbered with the outer axis running fastest, so that what one inner rank gives to a gather is one range of its segment:
place = inner rank * outer + outer rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    """Rows of one length, dealt evenly to the ranks.

    bucket_offset, inner_offset, shard_offset: where it starts in the gathered bucket, in a shard of the inner axis, and
        in a rank's shard (elements).
    shard_numel: elements of one rank's piece, a whole number of rows.
    outer: pieces that lie together in a shard of the inner axis.
    """

    row_numel: int
    num_ranks: int
    shard_numel: int
    bucket_offset: int
    inner_offset: int
    shard_offset: int
    outer: int = 1

    @property
    def numel(self) -> int:
        """Elements over all ranks, padding included."""
        return self.shard_numel * self.num_ranks

    @property
    def inner_numel(self) -> int:
        """Elements of a shard of the inner axis."""
        return self.shard_numel * self.outer

    @property
    def fusable(self) -> bool:
        """See [Note: Bits and cuts]."""
        return _fusable(self.row_numel)

    def piece(self, rank: int) -> tuple[int, int]:
        """Start and end of a rank's piece within the segment."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel


@dataclass(frozen=True)
class LocalSlice:
    """The part of one parameter that one rank holds.

    Elements [start, end) of the flattened parameter, at `offset` elements into the rank's piece of `segment`.
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
class Run:
    """Elements [start, end) of a rank's piece of `segment` that one optimizer group updates."""

    group: int
    segment: int
    start: int
    end: int


@dataclass(frozen=True)
class BucketLayout:
    """Places of all parameters of a bucket over `num_ranks` ranks, `outer` of which share a shard of the inner axis."""

    num_ranks: int
    align: int
    segments: tuple[Segment, ...]
    slots: tuple[Slot, ...]
    outer: int = 1

    @cached_property
    def bucket_numel(self) -> int:
        """Elements of the gathered bucket, padding included."""
        return sum(_round_up(s.numel, self.align) for s in self.segments)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return sum(_round_up(s.shard_numel, self.align) for s in self.segments)

    @cached_property
    def inner_numel(self) -> int:
        """Elements of a shard of the inner axis, padding included."""
        return sum(_round_up(s.inner_numel, self.align) for s in self.segments)

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
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the gathered bucket that belong to no parameter, in order."""
        edges = sorted(self.bucket_range(slot) for slot in self.slots)
        begins = [0, *(end for _, end in edges)]
        ends = [*(begin for begin, _ in edges), self.bucket_numel]
        return tuple((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)

    def local_slice(self, slot: Slot, rank: int) -> LocalSlice:
        """The rows of a parameter that a rank holds."""
        low, high = self.segments[slot.segment].piece(rank)
        start, end = max(slot.offset, low), min(slot.end, high)
        if start >= end:
            return LocalSlice(slot.segment, 0, 0, 0)
        return LocalSlice(slot.segment, start - low, start - slot.offset, end - slot.offset)

    def param_numel_on(self, rank: int) -> int:
        """Elements of parameters that a rank's shard holds, padding left out."""
        return sum(self.local_slice(slot, rank).numel for slot in self.slots)

    def runs(self, rank: int, group_of: Mapping[str, int]) -> list[Run]:
        """Ranges of a rank's shard by optimizer group, as few as there can be.

        A run takes the padding after its last parameter with it, so that it ends on a cut (see [Note: Bits and cuts]).
        Parameters without an entry in `group_of` are left out.
        """
        runs: list[Run] = []
        for index, segment in enumerate(self.segments):
            low, high = segment.piece(rank)
            slots = [slot for slot in self.slots if slot.segment == index and slot.spec.numel]
            for slot, after in zip_longest(slots, slots[1:]):
                until = after.offset if after is not None else segment.numel
                group = group_of.get(slot.spec.name)
                start, end = max(slot.offset, low) - low, min(until, high) - low
                if group is not None and start < end:
                    _extend(runs, Run(group, index, start, end))
        return runs


def _extend(runs: list[Run], run: Run) -> None:
    """Append a run, or lengthen the last one where it goes on."""
    last = runs[-1] if runs else None
    if last is not None and (last.group, last.segment, last.end) == (run.group, run.segment, run.start):
        runs[-1] = Run(run.group, run.segment, last.start, run.end)
    else:
        runs.append(run)


def plan_bucket(params: Sequence[ParamSpec], num_ranks: int, align: int, outer: int = 1) -> BucketLayout:
    """Lay parameters out over ranks; segments in order of first appearance, parameters in the order given.

    Args:
        params: names and shapes; names are unique.
        num_ranks: ranks of the sharding group, at least 1.
        align: elements; every parameter starts on a multiple of it.
        outer: how many of the ranks share a shard of the inner axis (see [Note: Inner-major]); divides num_ranks.

    Raises:
        ValueError: num_ranks, align or outer is below 1, outer does not divide num_ranks, or a name comes twice.
    """
    if num_ranks < 1 or align < 1 or outer < 1 or num_ranks % outer:
        raise ValueError(
            f"num_ranks={num_ranks}, align={align}, outer={outer}: at least 1, outer a divisor of num_ranks"
        )
    names = [p.name for p in params]
    if len(set(names)) != len(names):
        raise ValueError(f"parameter names must be unique: {sorted({n for n in names if names.count(n) > 1})}")
    row_lengths = list(dict.fromkeys(p.row_numel for p in params))
    segments: list[Segment] = []
    slots: dict[str, Slot] = {}
    bucket_offset = inner_offset = shard_offset = 0
    for index, row_numel in enumerate(row_lengths):
        end = _place(slots, (p for p in params if p.row_numel == row_numel), index, row_numel, align)
        shard_numel = _shard_numel(end, row_numel, num_ranks)
        segment = Segment(row_numel, num_ranks, shard_numel, bucket_offset, inner_offset, shard_offset, outer)
        segments.append(segment)
        bucket_offset += _round_up(segment.numel, align)
        inner_offset += _round_up(segment.inner_numel, align)
        shard_offset += _round_up(shard_numel, align)
    return BucketLayout(num_ranks, align, tuple(segments), tuple(slots[p.name] for p in params), outer)


def _place(slots: dict[str, Slot], params: Iterable[ParamSpec], segment: int, row_numel: int, align: int) -> int:
    """Give each parameter the next aligned row of its segment; returns the end of the last one."""
    step = math.lcm(align, row_numel)
    offset = end = 0
    for spec in params:
        slots[spec.name] = Slot(spec, segment, offset)
        end = offset + spec.numel
        offset = _round_up(end, step)
    return end


def _shard_numel(numel: int, row_numel: int, num_ranks: int) -> int:
    rows = -(-(numel // row_numel) // num_ranks)
    if num_ranks > 1 and _fusable(row_numel):
        rows = _round_up(rows, math.lcm(FUSED_CUT, row_numel) // row_numel)
    return rows * row_numel


def _fusable(row_numel: int) -> bool:
    return row_numel == 1 or row_numel % FUSED_CUT == 0


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
