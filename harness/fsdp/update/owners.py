"""Owners of whole matrices, planned from shapes: pure arithmetic, the same on every rank, no tensors, no torch."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

WORTH = 4096
"""Multiplications that take as long as a byte does from rank to rank: 400 TFLOPS in 16 bits beside 50 GB/s."""

ENOUGH = 1.02
"""Times the bound: a better balance is not looked for."""


@dataclass(frozen=True)
class Work:
    """cost: multiplications. num_bytes: of the result. holders: ranks that hold the whole matrix anyway."""

    cost: int
    num_bytes: int
    holders: Sequence[int] = ()


def is_shared(work: Work, num_ranks: int) -> bool:
    """True where one rank works for all: False where all have the matrix, and bringing the result takes longer."""
    everywhere = len(work.holders) == num_ranks
    return not everywhere or work.cost > WORTH * work.num_bytes


def least(costs: Sequence[int], num_ranks: int) -> int:
    """A bound that no distribution beats: the mean; the longest; and k + 1 of the kn + 1 longest, the shortest ones, as
    some rank has that many of them."""
    falling = [0, *accumulate(sorted(costs, reverse=True))]
    several = [
        falling[k * num_ranks + 1] - falling[k * (num_ranks - 1)] for k in range((len(costs) - 1) // num_ranks + 1)
    ]
    return max(-(-falling[-1] // num_ranks), *several, 0)


def owners_of(works: Sequence[Work], num_ranks: int) -> list[int]:
    """Owner of each matrix, by rank number: balanced by cost, and a holder where none waits for that."""
    costs = [work.cost for work in works]
    falling = sorted(range(len(works)), key=lambda each: (-costs[each], each))
    bound = least(costs, num_ranks)
    owners, longest = _longest_first(works, falling, num_ranks, bound)
    for percent in range(100, 100 * longest // max(bound, 1) if longest > bound * ENOUGH else 0):
        packed = _packed(costs, falling, num_ranks, bound * percent // 100)
        if packed is not None:
            return packed
    return owners


def _longest_first(works: Sequence[Work], falling: Sequence[int], num_ranks: int, bound: int) -> tuple[list[int], int]:
    """Each to whoever has least to do; also the largest load."""
    loads, owners = [0] * num_ranks, [0] * len(works)
    idle = [(0, rank) for rank in range(num_ranks)]
    for place in falling:
        work = works[place]
        owner = min(work.holders, key=loads.__getitem__, default=None)
        if owner is None or loads[owner] + work.cost > bound:
            while loads[idle[0][1]] != idle[0][0]:
                heapq.heappop(idle)
            owner = idle[0][1]
        loads[owner] += work.cost
        owners[place] = owner
        heapq.heappush(idle, (loads[owner], owner))
    return owners, max(loads)


def _packed(costs: Sequence[int], falling: Sequence[int], num_ranks: int, most: int) -> list[int] | None:
    """Each to whoever it leaves least room, where none has more than `most` to do; None if it does not fit so."""
    owners, room = [0] * len(costs), [(most, rank) for rank in range(num_ranks)]
    for place in falling:
        found = bisect_left(room, (costs[place], 0))
        if found == num_ranks:
            return None
        left, owners[place] = room.pop(found)
        insort(room, (left - costs[place], owners[place]))
    return owners
