"""Two axes: every pair of inner and outer strategy against one process in fp64, and against each other to the bit."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from tests.fsdp.test_oracle import check
from tests.fsdp.trial import Case, Record, run_cases
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PAIRS = tuple(itertools.product(STRATEGIES, ("no_shard", "optim")))
MESHES = ((4, 2), (4, 4), (6, 3))
"""Ranks, and how many of them the outer axis has: 2x2, 1x4, 2x3."""
OPTIMIZERS = (("sgd", None), ("adamw", 0.5))


def cases(world: int, outer: int) -> list[Case]:
    found = []
    for (inner, split), (index, (k, dtype, numerics)) in itertools.product(
        PAIRS, enumerate(itertools.product((1, 2), ("fp32", "bf16_comm"), ("fast", "ordered")))
    ):
        optimizer, clip = OPTIMIZERS[(index + PAIRS.index((inner, split))) % 2]
        if numerics == "ordered":
            optimizer, clip = "adamw", 0.5
        found.append(
            Case("native", inner, world, k, 0, optimizer, clip, dtype, numerics, 3, outer=outer, outer_strategy=split)
        )
    return found


@cache
def records(world: int, outer: int) -> dict[Case, list[Record]]:
    """Case -> its record on each rank; tensors are on rank 0."""
    todo = cases(world, outer)
    per_rank = run_ranks(run_cases, world, todo)
    return {case: [ran[index] for ran in per_rank] for index, case in enumerate(todo)}


@pytest.mark.parametrize(("inner", "split"), PAIRS)
@pytest.mark.parametrize(("world", "outer"), MESHES)
def test_training_equals_one_process_in_fp64(world: int, outer: int, inner: str, split: str) -> None:
    for case, ran in records(world, outer).items():
        if (case.strategy, case.outer_strategy) == (inner, split):
            check(ran[0])
            assert len({tuple(each.norms) for each in ran}) == 1, "every rank knows the same norm"


def bits(record: Record) -> list[torch.Tensor]:
    return [value for step in sorted(record.weights) for value in record.weights[step].values()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16_comm"])
@pytest.mark.parametrize(("world", "outer"), MESHES)
def test_ordered_is_bitwise_equal_across_pairs(world: int, outer: int, dtype: str) -> None:
    """With one microbatch all pairs sum alike; with two, those that sum microbatches at the same place."""
    for k in (1, 2):
        found = {
            (case.strategy, case.outer_strategy): ran[0]
            for case, ran in records(world, outer).items()
            if (case.k, case.dtype, case.numerics) == (k, dtype, "ordered")
        }
        assert len(found) == len(PAIRS)
        groups = [STRATEGIES] if k == 1 else [STRATEGIES[:2], STRATEGIES[2:]]
        for group in groups:
            first = bits(found[group[0], "no_shard"])
            for inner, split in itertools.product(group, ("no_shard", "optim")):
                other = bits(found[inner, split])
                same = all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
                assert same, f"k={k}: {group[0]} without outer split, and {inner} with outer {split}"
