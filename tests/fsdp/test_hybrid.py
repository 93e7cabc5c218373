"""Two axes: every pair of inner and outer strategy against one process in fp64, and against each other to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.fsdp.test_oracle import check
from tests.fsdp.trial import Case, Record, run_cases
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PAIRS = tuple(itertools.product(STRATEGIES, ("no_shard", "optim")))
MESHES = ((4, 2), (4, 4), (6, 3))
"""Ranks, and how many of them the outer axis has: 2x2, 1x4, 2x3."""
OPTIMIZERS = (("sgd", None), ("adamw", 0.5))


def case(
    world: int,
    outer: int,
    inner: str,
    split: str,
    k: int,
    dtype: str,
    numerics: str,
    optimizer: str,
    clip: float | None,
) -> Case:
    return Case(
        "native", inner, world, k, 0, optimizer, clip, dtype, numerics, 3, outer=outer, outer_strategy=split
    )  # fmt: skip


TRAININGS = Cover(
    (
        case(*mesh, *pair, k, dtype, "fast", *OPTIMIZERS[index])
        for mesh, pair, k, dtype, index in itertools.product(MESHES, PAIRS, (1, 2), ("fp32", "bf16_comm"), (0, 1))
    ),
    values=lambda each: (
        (each.world_size, each.outer), each.strategy, each.outer_strategy, each.k, each.dtype, each.optimizer
    ),
    key=lambda each: each.world_size,
)  # fmt: skip
ORDERED = Cover(itertools.product(MESHES, ("fp32", "bf16_comm"), (1, 2)), key=lambda each: each[0], strength=1)
"""Mesh, dtypes and microbatches a rank; each is run by every pair, so that a few are many trainings."""


@once
def records(cases: tuple[Case, ...]) -> dict[Case, list[Record]]:
    """Case -> its record on each rank, of cases of one number of ranks; tensors are on rank 0."""
    per_rank = run_ranks(run_cases, cases[0].world_size, list(cases))
    return {case: [ran[index] for ran in per_rank] for index, case in enumerate(cases)}


def name_of(case: Case) -> str:
    mesh = f"{case.world_size // case.outer}x{case.outer}"
    return f"{mesh}-{case.strategy}-{case.outer_strategy}-k{case.k}-{case.dtype}-{case.optimizer}"


@pytest.mark.parametrize("case", TRAININGS.params(name_of))
def test_training_equals_one_process_in_fp64(case: Case) -> None:
    ran = records(TRAININGS.batch(case))[case]
    check(ran[0])
    assert len({tuple(each.norms) for each in ran}) == 1, "every rank knows the same norm"


def bits(record: Record) -> list[torch.Tensor]:
    return [value for step in sorted(record.weights) for value in record.weights[step].values()]


Group = tuple[tuple[int, int], str, int]


def ordered(group: Group, pair: tuple[str, str]) -> Case:
    mesh, dtype, k = group
    return case(*mesh, *pair, k, dtype, "ordered", *OPTIMIZERS[1])


@pytest.mark.parametrize("group", ORDERED.params())
def test_ordered_is_bitwise_equal_across_pairs_and_near_one_process(group: Group) -> None:
    """With one microbatch all pairs sum alike; with two, those that sum microbatches at the same place."""
    found = records(tuple(ordered(each, pair) for each in ORDERED.batch(group) for pair in PAIRS))
    strategies = [STRATEGIES] if group[-1] == 1 else [STRATEGIES[:2], STRATEGIES[2:]]
    for alike in strategies:
        first = found[ordered(group, (alike[0], "no_shard"))]
        check(first[0])
        for pair in itertools.product(alike, ("no_shard", "optim")):
            other = found[ordered(group, pair)]
            same = all(torch.equal(a, b) for a, b in zip(bits(first[0]), bits(other[0]), strict=True))
            assert same, f"{alike[0]} without outer split, and inner and outer {pair}"
            assert [each.norms for each in other] == [each.norms for each in first]
            assert len({tuple(each.norms) for each in other}) == 1, "every rank knows the same norm"
