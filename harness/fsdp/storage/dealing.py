"""How the parameters of one segment are dealt to ranks: offsets and bounds from lengths. No tensors, no torch.

[Note: Blocks] A *block* is what no rank boundary cuts: m rows under the grain `block(m)`, one row under `row`. Each
parameter starts on a whole block of its segment and every bound lies on one, so that a boundary is a multiple of m rows
from the first row of the parameter it falls in. With n parameters and blocks of b elements, padding after parameters is
less than n * lcm(align, b): m - 1 rows each at most, where align divides a block.

Shards are *even*, one length on every rank, for as long as that pads little: rows always are, and blocks where even
shards are at most an eighth longer than the blocks alone. Otherwise they are *ragged*: no rank has more than one
block above another, and nothing is padded. On 1,024 ranks even shards of block(128) would make a layer of Llama-70B
5.6 times as long, because the 64 blocks of its widest matrix would become 1,024.

[Note: Owners] A parameter of grain `whole` has one owner. Even shards would all be as long as the longest: seven
matrices on 1,024 ranks would be gathered into 1,024 times the largest. So whole parameters have a ragged segment of
their own, in which a rank's shard is as long as what it owns. Padding is less than lcm(align, 64) elements a parameter
at any number of ranks; the price is a gather of uneven shards. torchtitan's FlexShard pays it too (`Owned`: a broadcast
from each owner); veScale orders the blocks of all parameters within even shards, which can then be no shorter than the
largest matrix.

Owners are chosen by *longest processing time first* (LPT): parameters by falling length, each to the rank whose load is
least so far. With lengths w in falling order over p ranks that hold nothing yet, no load is above
max(w[0], sum(w) / p + (1 - 1/p) * w[p]), nor above 4/3 - 1/(3p) times the least that any choice of owners allows.

[Note: Loads] What a rank holds of ragged segments is its load. Segments and buckets are dealt one by one, and each goes
on with the loads that the last one left: otherwise the first few ranks would hold the odd blocks, and own the matrices,
of every layer. Among equal loads the next rank is taken from another shard of the inner axis.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

FUSED_CUT = 64
"""Elements; fused optimizer kernels give the same bits when cut at multiples of this."""
EVEN_LIMIT = 8
"""Shards of blocks are even where that adds at most 1/EVEN_LIMIT to the blocks; see [Note: Blocks]."""


class Dealt(NamedTuple):
    """One segment's parameters, dealt.

    block_numel: elements of a block. offsets: of each parameter, in the order given (elements). bounds: rank r's shard
    is [bounds[r], bounds[r + 1]). even: whether all shards have one length.
    """

    block_numel: int
    offsets: list[int]
    bounds: tuple[int, ...]
    even: bool

    def loads(self, before: Sequence[int]) -> list[int]:
        """Loads of all ranks with this segment, of those before it; see [Note: Loads]."""
        if self.even:
            return list(before)
        return [load + end - begin for load, (begin, end) in zip(before, pairwise(self.bounds), strict=True)]


def deal_blocks(
    numels: Sequence[int], block_numel: int, align: int, loads: Sequence[int], outer: int, *, even: bool
) -> Dealt:
    """Deal parameters that may be cut between blocks; see [Note: Blocks].

    Args:
        numels: elements of each parameter.
        block_numel: elements of a block.
        align: elements; every parameter starts on a multiple of it.
        loads: of all ranks so far.
        outer: ranks that share a shard of the inner axis.
        even: make shards even whatever that pads.
    """
    offsets, end = _starts(numels, math.lcm(align, block_numel))
    num_ranks = len(loads)
    shard_numel = _shard_numel(end, block_numel, num_ranks)
    blocks = -(-end // block_numel)
    if even or EVEN_LIMIT * (shard_numel * num_ranks - blocks * block_numel) <= blocks * block_numel:
        return Dealt(block_numel, offsets, tuple(rank * shard_numel for rank in range(num_ranks + 1)), even=True)
    each, left = divmod(blocks, num_ranks)
    counts = [each] * num_ranks
    for rank in sorted(range(num_ranks), key=lambda rank: _turn(loads[rank], rank, outer))[:left]:
        counts[rank] += 1
    return Dealt(block_numel, offsets, (0, *accumulate(count * block_numel for count in counts)), even=False)


def deal_owners(numels: Sequence[int], align: int, loads: Sequence[int], outer: int) -> Dealt:
    """Deal parameters that have one owner each; see [Note: Owners]. Arguments as of `deal_blocks`."""
    step = math.lcm(align, FUSED_CUT)
    lengths = [round_up(numel, step) for numel in numels]
    owners = _longest_first(lengths, loads, outer)
    held = [0] * len(loads)
    within: list[int] = []
    for owner, length in zip(owners, lengths, strict=True):
        within.append(held[owner])
        held[owner] += length
    bounds = (0, *accumulate(held))
    return Dealt(step, [bounds[owner] + at for owner, at in zip(owners, within, strict=True)], bounds, even=False)


def is_fusable(block_numel: int) -> bool:
    """Whether shards of such blocks are cut at multiples of `FUSED_CUT` elements; a function of their length alone."""
    return block_numel == 1 or block_numel % FUSED_CUT == 0


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def _starts(numels: Sequence[int], step: int) -> tuple[list[int], int]:
    """Each parameter's start, on the next multiple of `step`, and the end of the last one."""
    starts: list[int] = []
    end = 0
    for numel in numels:
        starts.append(round_up(end, step))
        end = starts[-1] + numel
    return starts, end


def _shard_numel(numel: int, block_numel: int, num_ranks: int) -> int:
    """Elements of an even shard."""
    blocks = -(-numel // (block_numel * num_ranks))
    if num_ranks > 1 and is_fusable(block_numel):
        blocks = round_up(blocks, math.lcm(FUSED_CUT, block_numel) // block_numel)
    return blocks * block_numel


def _longest_first(lengths: Sequence[int], loads: Sequence[int], outer: int) -> list[int]:
    """The owner of each length."""
    heap = [(*_turn(load, rank, outer), rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, _, _, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (*_turn(load + lengths[index], rank, outer), rank))
    return owners


def _turn(load: int, rank: int, outer: int) -> tuple[int, int, int]:
    """What orders ranks: the least load, then another shard of the inner axis."""
    return load, rank % outer, rank // outer
