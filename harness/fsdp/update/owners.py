"""Owners of whole matrices, planned from shapes: pure arithmetic, the same on every rank, no tensors, no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

WORTH = 4096
"""Multiplications that take as long as a byte does from rank to rank: 400 TFLOPS in 16 bits beside 50 GB/s."""


@dataclass(frozen=True)
class Work:
    """cost: multiplications. num_bytes: of the result. holders: ranks that hold the whole matrix anyway."""

    cost: int
    num_bytes: int
    holders: Sequence[int] = ()


def is_shared(work: Work, num_ranks: int) -> bool:
    """True where one rank works for all: False where all have the matrix, and bringing the result takes longer."""
    return len(work.holders) < num_ranks or work.cost > WORTH * work.num_bytes


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
    bound = least([work.cost for work in works], num_ranks)
    limits = ((bound * percent // 100, tight) for percent in count(100) for tight in (False, True))
    tries = (_packed(works, num_ranks, most, tight=tight) for most, tight in limits)
    return next(found for found in tries if found is not None)


def _packed(works: Sequence[Work], num_ranks: int, most: int, *, tight: bool) -> list[int] | None:
    """The longest first, each to a holder with room for it, else to whoever has most, or (`tight`) just enough. None if
    somebody would have more than `most` to do."""
    owners, room, by_room = [0] * len(works), [most] * num_ranks, [(most, rank) for rank in range(num_ranks)]
    for place in sorted(range(len(works)), key=lambda each: (-works[each].cost, each)):
        cost = works[place].cost
        free = [(room[rank], rank) for rank in works[place].holders if room[rank] >= cost]
        at = bisect_left(by_room, max(free) if free else (cost if tight else max(cost, by_room[-1][0]), 0))
        if at == num_ranks:
            return None
        left, owner = by_room.pop(at)
        room[owner] = left - cost
        insort(by_room, (room[owner], owner))
        owners[place] = owner
    return owners
