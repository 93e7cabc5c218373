"""Owners of matrices are balanced within 5 % of a bound, planned at 2 to 1,024 ranks from shapes alone."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from itertools import accumulate

import pytest

from harness import muon
from harness.fsdp.update import owners
from harness.fsdp.update.owners import Work, owners_of
from tests.support.mutants import Slip, each

Shapes = list[tuple[int, int]]


def llama(width: int, hidden: int, keys: int, layers: int) -> Shapes:
    layer = [(width, width), (keys, width), (keys, width), (width, width)]
    return [*layer, (hidden, width), (hidden, width), (width, hidden)] * layers


EXPERT = [(14336, 4096), (14336, 4096), (4096, 14336)]
FINE = [(2048, 7168), (2048, 7168), (7168, 2048)]
MODELS = {
    "GPT-2": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "8B": llama(4096, 14336, 1024, 32),
    "70B": llama(8192, 28672, 1024, 80),
    "405B": llama(16384, 53248, 1024, 126),
    "8 experts": [*llama(4096, 1, 1024, 1)[:4], *EXPERT * 8] * 32,
    "257 experts": [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), *FINE * 257] * 4,
    "odd": [(place * 37 % 400 + 3, place * 91 % 700 + 5) for place in range(300)],
}
RANKS = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 768, 1024


def works_of(shapes: Shapes) -> list[Work]:
    return [Work(muon.multiplications(*shape, 5), 2 * shape[0] * shape[1]) for shape in shapes]


def bins(costs: list[int], most: int) -> int:
    """How many ranks there have to be, if none has more than `most` to do (Martello and Toth's bound, 1990).

    costs: rising. For any length: what leaves no room for that has ranks of its own; so has what is more than half, and
    its rest is filled with what is at least so long.
    """
    sums, half = [0, *accumulate(costs)], bisect_right(costs, most // 2)
    found = 0
    for length in {0, *costs[:half]}:
        alone, begin = bisect_right(costs, most - length), bisect_left(costs, length)
        alone = max(alone, half)
        room = (alone - half) * most - (sums[alone] - sums[half])
        rest = sums[half] - sums[begin] - room
        found = max(found, len(costs) - half + max(0, -(-rest // most)))
    return found


def holds_two_kinds(costs: list[int], most: int, num_ranks: int) -> bool:
    """False if not even matrices of the two greatest costs fit, where a rank may have fractions of the longer ones."""
    shorter, longer = sorted({*costs})[-2:]
    room = [(most - count * longer) // shorter for count in range(most // longer + 1)]
    mean = costs.count(longer) / num_ranks
    between = [
        room[i] + (room[j] - room[i]) * (mean - i) / max(j - i, 1)
        for i, j in itertools.combinations_with_replacement(range(len(room)), 2)
        if i <= mean <= j
    ]
    return bool(between) and max(between) * num_ranks >= costs.count(shorter)


def bound(costs: list[int], num_ranks: int) -> int:
    costs = sorted(costs)
    low, high = owners.least(costs, num_ranks), 2 * owners.least(costs, num_ranks)
    while high - low > low // 1000:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(costs, middle, num_ranks) else (middle + 1, high)
    return low


def fits(costs: list[int], most: int, num_ranks: int) -> bool:
    """False where it is known that some rank has more to do."""
    return bins(costs, most) <= num_ranks and (len({*costs}) < 2 or holds_two_kinds(costs, most, num_ranks))


def unbalance(shapes: Shapes, num_ranks: int) -> float:
    """The largest load over a bound of it, less 1."""
    works = works_of(shapes)
    loads = [0] * num_ranks
    for work, owner in zip(works, owners_of(works, num_ranks), strict=True):
        loads[owner] += work.cost
    costs = [work.cost for work in works]
    assert sum(loads) == sum(costs)
    return max(loads) / bound(costs, num_ranks) - 1


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_owners_are_balanced(model: str, num_ranks: int) -> None:
    assert unbalance(MODELS[model], num_ranks) <= 0.05


MISTAKES = {
    "shortest first": Slip(owners, "_packed", "(-works[each]", "(works[each]", "The longest come last"),
    "by number": Slip(muon, "multiplications", "", lambda _: lambda *_: 1, "Matrices are counted, not their work"),
    "not packed": Slip(owners, "_packed", "cost if tight else ", "", "Each goes to whoever has least to do"),
}


@pytest.mark.parametrize("name", each("owners of matrices", MISTAKES))
def test_a_mistake_in_the_plan_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = works_of(MODELS["GPT-2"])
    MISTAKES[name].put(monkeypatch)
    works = works_of(MODELS["GPT-2"])
    loads = [0] * 16
    for work, owner in zip(right, owners.owners_of(works, 16), strict=True):
        loads[owner] += work.cost
    assert max(loads) > 1.05 * bound([work.cost for work in right], 16)


def test_a_holder_owns_what_it_has_where_none_waits_for_it() -> None:
    works = [Work(10, 1, [place // 2]) for place in range(8)]
    assert owners_of(works, 4) == [place // 2 for place in range(8)]
    crowded = [Work(10, 1, [0]) for _ in range(8)]
    assert sorted(owners_of(crowded, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_nothing_and_less_than_ranks_have_plans() -> None:
    assert owners_of([], 3) == []
    assert len(set(owners_of([Work(5, 1)] * 3, 8))) == 3
    assert owners_of([Work(0, 0)] * 2, 1) == [0, 0]


def test_small_matrices_that_all_have_are_worked_out_by_all() -> None:
    assert not owners.is_shared(Work(1000, 2, range(4)), 4)
    assert owners.is_shared(Work(1 << 20, 2, range(4)), 4)
    assert owners.is_shared(Work(1000, 2, range(3)), 4)
