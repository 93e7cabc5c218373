"""What each collective of a bucket moves, for all eight pairs and odd sizes: element numbers instead of numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from harness.fsdp import OuterStrategy, Placements, Strategy
from harness.fsdp.comm.communicator import Part
from harness.fsdp.storage.cuts import Cuts, Place
from harness.fsdp.storage.layout import ParamSpec
from harness.fsdp.storage.placement import SHARD

PAIRS = list(itertools.product(Strategy, OuterStrategy))
shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)
grids = st.tuples(st.integers(1, 4), st.integers(1, 4))


def grid_of(
    found: list[tuple[int, ...]], grid: tuple[int, int], strategy: Strategy, split: OuterStrategy
) -> dict[tuple[int, int], Cuts]:
    """The cuts of a trained bucket on every rank, by inner and outer rank."""
    inner, outer = grid
    placements = Placements.of(strategy, split if outer > 1 else None)
    specs = [ParamSpec(f"p{i}", shape) for i, shape in enumerate(found)]
    places = [Place(i, inner, o, outer) for i in range(inner) for o in range(outer)]
    return {(p.inner_rank, p.outer_rank): Cuts.plan(specs, p, placements, 64) for p in places}


def whole_of(cuts: Cuts) -> Tensor:
    return torch.arange(cuts.layout.bucket_numel)


def elements(tensors: Iterable[Tensor]) -> list[int]:
    return [element for tensor in tensors for element in tensor.tolist()]


def of_params(cuts: Cuts) -> set[int]:
    return {e for slot in cuts.layout.slots for e in range(*cuts.layout.bucket_range(slot))}


def of_segments(cuts: Cuts) -> set[int]:
    return {e for s in cuts.layout.segments for e in range(s.bucket_offset, s.bucket_offset + s.numel)}


def chunks(parts: list[Part], rank: int) -> list[Tensor]:
    return [part.chunk(rank) for part in parts]


def reduced_inside(cuts: Cuts) -> list[Tensor]:
    """What a rank has sums of when the inner axis is done."""
    return chunks(cuts.inner_parts(whole_of(cuts)), cuts.place.inner_rank)


def sent_outside(cuts: Cuts) -> list[Part]:
    """What goes over the outer axis then (as `harness.fsdp.runtime.reduce` has it)."""
    return cuts.outer_parts(cuts.inner_shards(whole_of(cuts)) if SHARD in cuts.own else reduced_inside(cuts))


def once(found: list[int], cuts: Cuts, what: str) -> None:
    """Every element of a parameter, none twice, and nothing that lies between segments."""
    assert max(Counter(found).values(), default=1) == 1, f"{what}: an element twice"
    assert of_params(cuts) <= set(found) <= set(range(cuts.layout.bucket_numel)), what


def by_outer(grid: dict[tuple[int, int], Cuts]) -> Iterator[list[Cuts]]:
    """The ranks of each inner group."""
    for outer in sorted({o for _, o in grid}):
        yield [cuts for (_, o), cuts in grid.items() if o == outer]


@pytest.mark.parametrize(("strategy", "split"), PAIRS, ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(shapes, grids)
def test_every_collective_moves_each_element_once(
    strategy: Strategy, split: OuterStrategy, found: list[tuple[int, ...]], size: tuple[int, int]
) -> None:
    grid = grid_of(found, size, strategy, split)
    inner, outer = size
    for group in by_outer(grid):
        any_rank = group[0]
        for cuts in group:
            assert [part.cut.spans for part in cuts.inner_parts(whole_of(cuts))] == [
                part.cut.spans for part in any_rank.inner_parts(whole_of(any_rank))
            ], "all ranks cut alike"
        once(elements(itertools.chain(*map(reduced_inside, group))), any_rank, "the inner reduction")
        sent = [chunk for cuts in group for owner in range(outer) for chunk in chunks(sent_outside(cuts), owner)]
        once(elements(sent), any_rank, "the outer reduction")
        for cuts in group:  # only what the inner axis has summed here may go out
            here = set(elements(reduced_inside(cuts)))
            for owner in range(outer):
                assert set(elements(chunks(sent_outside(cuts), owner))) <= here
        if any_rank.own.inner is SHARD:
            continue
        back = [elements(chunks(c.second_leg_parts(whole_of(c)), c.place.inner_rank)) for c in group]
        owned = elements(any_rank.own_shards(any_rank.inner_shards(whole_of(any_rank))))
        if any_rank.own.outer is SHARD:
            assert sorted(itertools.chain(*back)) == sorted(owned), "the second leg brings own pieces together"
            for cuts, given_back in zip(group, back, strict=True):
                arrived = elements(chunks(sent_outside(cuts), cuts.place.outer_rank))
                assert given_back == arrived, "what a rank gives back is what it got from outside"
        else:
            once(list(itertools.chain(*back)), any_rank, "the second leg")
    assert inner * outer == len(grid)


@pytest.mark.parametrize(("strategy", "split"), PAIRS, ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(shapes, grids)
def test_own_shards_and_gathers_bring_every_element_back(
    strategy: Strategy, split: OuterStrategy, found: list[tuple[int, ...]], size: tuple[int, int]
) -> None:
    grid = grid_of(found, size, strategy, split)
    own = {place: elements(cuts.own_shards(cuts.inner_shards(whole_of(cuts)))) for place, cuts in grid.items()}
    any_rank = grid[0, 0]
    counted = [e for place, cuts in grid.items() if cuts.is_counted_here for e in own[place]]
    assert sorted(counted) == sorted(of_segments(any_rank)), "the norm counts each element once"
    position: dict[int, set[int]] = {}
    for place, cuts in grid.items():
        position.setdefault(cuts.layout_rank, set()).update(own[place])
        for slot in cuts.layout.slots:
            local = cuts.layout.local_slice(slot, cuts.layout_rank)
            begin = cuts.layout.bucket_range(slot)[0]
            assert set(range(begin + local.start, begin + local.end)) <= set(own[place])
    assert sorted(e for held in position.values() for e in held) == sorted(of_segments(any_rank))
    if SHARD not in any_rank.own:
        return
    known = {place: set(held) for place, held in own.items()}
    for (i, o), cuts in grid.items() if any_rank.own.outer is SHARD else ():
        for owner in range(size[1]):
            given_by = elements(chunks(cuts.outer_parts(cuts.inner_shards(whole_of(cuts))), owner))
            assert set(given_by) <= set(own[i, owner]), "a rank gives what it has"
            known[i, o].update(given_by)
    for (i, o), cuts in grid.items():
        arrived = set(known[i, o])
        for giver in range(size[0]):
            given_by = elements(chunks(cuts.inner_parts(whole_of(cuts)), giver))
            assert set(given_by) <= known[giver, o], "a rank gives what the outer axis brought it"
            arrived.update(given_by)
        assert of_params(cuts) <= arrived, "weights are whole"
