"""Layout invariants, from one rank to 1,024, and what each collective of a bucket moves: element numbers alone."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from harness.fsdp import OuterStrategy, Placements, Strategy
from harness.fsdp.comm.communicator import Part
from harness.fsdp.comm.mesh import Place
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import FUSED_CUT, ParamSpec, plan_bucket
from harness.fsdp.storage.placement import SHARD
from tests.support.mutants import each_found_by

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 6))
grids_of_many = st.one_of(GRIDS, st.sampled_from([(63, 1), (16, 4), (5, 51), (1024, 1)]))


def specs(found: list[tuple[int, ...]]) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", shape) for i, shape in enumerate(found)]


@settings(max_examples=200, deadline=None)
@given(shapes, grids_of_many, st.sampled_from([64, 128]))
def test_every_element_lies_on_exactly_one_rank_and_no_row_is_cut(
    found: list[tuple[int, ...]], grid: tuple[int, int], align: int
) -> None:
    num_ranks = grid[0] * grid[1]
    layout, alone = plan_bucket(specs(found), num_ranks, align, grid[1]), plan_bucket(specs(found), 1, align)
    assert [(s.segment, s.offset) for s in layout.slots] == [(s.segment, s.offset) for s in alone.slots]
    for slot in layout.slots:
        begin, end = layout.bucket_range(slot)
        assert begin % align == 0, "every parameter starts on an aligned place, whatever the ranks"
        assert end <= layout.bucket_numel
        covered = 0
        for rank in range(num_ranks):
            part = layout.local_slice(slot, rank)
            assert part.start % slot.spec.row_numel == 0, "a rank boundary never cuts a row"
            assert part.end % slot.spec.row_numel == 0
            assert part.numel == 0 or part.start == covered
            assert part.offset + part.numel <= layout.segments[slot.segment].shard_numel
            covered += part.numel
        assert covered == slot.spec.numel


def llama_block(dim: int, kv: int, ffn: int) -> list[ParamSpec]:
    return [
        ParamSpec(name, shape)
        for name, shape in {
            "norm1": (dim,), "wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim),
            "norm2": (dim,), "w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim),
        }.items()
    ]  # fmt: skip


def test_the_layout_does_not_load_torch() -> None:
    code = "import sys, harness.fsdp.storage.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=150, deadline=None)
@given(shapes, GRIDS)
def test_parameters_and_gaps_cover_each_element_once(found: list[tuple[int, ...]], grid: tuple[int, int]) -> None:
    """And what a fused kernel steps of a parameter begins, and ends before its end, where whole vectors do."""
    inner, outer = grid
    layout = plan_bucket(specs(found), inner * outer, 64, outer)
    taken: set[int] = set()
    for begin, end in [*map(layout.bucket_range, layout.slots), *layout.gaps]:
        assert taken.isdisjoint(range(begin, end))
        taken.update(range(begin, end))
    assert taken == set(range(layout.bucket_numel))
    for slot in (each for each in layout.slots if layout.segments[each.segment].fusable):
        for each in (layout.local_slice(slot, rank) for rank in range(inner * outer)):
            assert each.start % FUSED_CUT == 0
            assert each.end % FUSED_CUT == 0 or each.end == slot.spec.numel


LLAMAS = {"8b": (4096, 1024, 14336), "70b": (8192, 1024, 28672)}
VOCABULARY = 128256


def llama_root(dim: int) -> list[ParamSpec]:
    return [ParamSpec(n, s) for n, s in {"embed": (VOCABULARY, dim), "norm": (dim,), "head": (VOCABULARY, dim)}.items()]


@pytest.mark.parametrize("model", LLAMAS)
def test_padding_is_the_least_that_whole_rows_allow_at_any_number_of_ranks(model: str) -> None:
    """And a thousandth of a block where they are a power of two: 4,096 rows over 1,000 ranks are five rows each."""
    dim, kv, ffn = LLAMAS[model]
    for num_ranks in range(1, 1025):
        block, root = (plan_bucket(params, num_ranks, 128) for params in (llama_block(dim, kv, ffn), llama_root(dim)))
        assert num_ranks & (num_ranks - 1) or block.bucket_numel / block.param_numel - 1 < 1e-3, num_ranks
        for params, layout in ((llama_block(dim, kv, ffn), block), (llama_root(dim), root)):
            for segment in layout.segments:
                rows = sum(each.numel // each.row_numel for each in params if each.row_numel == segment.row_numel)
                step = 1 if segment.row_numel > 1 or num_ranks == 1 else FUSED_CUT
                least = math.ceil(math.ceil(rows / num_ranks) / step) * step
                assert segment.shard_numel == least * segment.row_numel, (num_ranks, segment)


# -- what collectives move ---------------------------------------------------------------------------------------------

PAIRS = list(itertools.product(Strategy, OuterStrategy))
few_shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)
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


def each_once(found: list[int], cuts: Cuts, what: str) -> None:
    """Every element of a parameter, none twice, and nothing that lies between segments."""
    assert max(Counter(found).values(), default=1) == 1, f"{what}: an element twice"
    assert of_params(cuts) <= set(found) <= set(range(cuts.layout.bucket_numel)), what


def by_outer(grid: dict[tuple[int, int], Cuts]) -> Iterator[list[Cuts]]:
    """The ranks of each inner group."""
    for outer in sorted({o for _, o in grid}):
        yield [cuts for (_, o), cuts in grid.items() if o == outer]


@pytest.mark.parametrize(("strategy", "split"), PAIRS, ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(few_shapes, grids)
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
        each_once(elements(itertools.chain(*map(reduced_inside, group))), any_rank, "the inner reduction")
        sent = [chunk for cuts in group for owner in range(outer) for chunk in chunks(sent_outside(cuts), owner)]
        each_once(elements(sent), any_rank, "the outer reduction")
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
            each_once(list(itertools.chain(*back)), any_rank, "the second leg")
    assert inner * outer == len(grid)


@pytest.mark.parametrize(("strategy", "split"), PAIRS, ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(few_shapes, grids)
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


def test_one_bucket_of_every_kind_of_parameter() -> None:
    """The properties above, on a grid of three by two."""
    given: list[Any] = [[(10, 3), (), (70,), (3, 64), (0, 3), (300,), (9, 3)], (3, 2)]
    test_every_element_lies_on_exactly_one_rank_and_no_row_is_cut.hypothesis.inner_test(*given, 64)
    test_parameters_and_gaps_cover_each_element_once.hypothesis.inner_test(*given)
    for pair in PAIRS:
        test_every_collective_moves_each_element_once.hypothesis.inner_test(*pair, *given)
        test_own_shards_and_gathers_bring_every_element_back.hypothesis.inner_test(*pair, *given)


test_a_mutant_is_found = each_found_by(
    "The engine, by where elements lie",
    """
    last rows: Rows that the ranks do not divide have no place
        fsdp.storage.layout._shard_numel: -(-numel // (row_numel * num_ranks)) => numel // (row_numel * num_ranks)
    rows for elements: A shard is as many elements long as it has rows
        fsdp.storage.layout._shard_numel: return rows * row_numel => return rows
    cut anywhere: Shards are cut where a fused kernel has no whole vector
        fsdp.storage.layout._shard_numel: num_ranks > 1 and _is_fusable(row_numel) => False
    places of the segment: A parameter's place in a shard is its place in the segment
        fsdp.storage.layout._within: start - low, => start,
    to the shard's end: A rank's part of a parameter goes on to the end of the shard
        fsdp.storage.layout._within: min(slot.end, high) => high
    first segment: Parameters of later segments lie in the first one
        fsdp.storage.layout.BucketLayout.bucket_range: return base + slot.offset => return slot.offset
    outer rank first: Ranks of a layout are numbered along the wrong axis
        fsdp.storage.cuts.Cuts.layout_rank: self.inner_index * self.layout.outer + self.outer_index
        => self.outer_index * self.place.inner_size + self.inner_index
    counted by all: Inner ranks that hold the same elements each count them for the norm
        fsdp.storage.cuts.Cuts.is_counted_here: (self.place.inner_rank, => (self.inner_index,
    shards of the outer axis: An inner rank's shard begins where that of a single rank would
        fsdp.storage.cuts.Cuts.inner_shards: self.inner_index * s.inner_numel => self.inner_index * s.shard_numel
    inner for outer: The outer axis is cut by the place on the inner one
        fsdp.storage.cuts.Cuts.own_shards: self.outer_index * s.shard_numel => self.inner_index * s.shard_numel
    """,
    test_one_bucket_of_every_kind_of_parameter,
)
