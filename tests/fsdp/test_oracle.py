"""The engine against one process in fp64: every strategy, mesh, dtype and microbatch count; and strategies and pairs of
them against each other, to the bit. Bounds are those of `tests.engines.conformance.checks`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.fsdp.trial import Case, differences, records, wrong
from tests.support.covering import Cover

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER = ("no_shard", "optim")
MESHES = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (6, 3))
"""Ranks, and how many of them the outer axis has: 2x2, 1x4 and 2x3 at the end."""
CLIP = 0.5  # below the norms that occur, so that it acts
WAYS = (("sgd", None), ("adamw", CLIP))
"""The others, clipped SGD and Adam that is not, meet every mesh and dtype in the conformance suite."""


def splits(outer: int) -> tuple[str, ...]:
    """What the outer axis may do; of one rank, nothing."""
    return OUTER if outer > 1 else OUTER[:1]


TRAININGS = Cover(
    (
        Case("native", inner, world, k, 0, *way, dtype, outer=outer, outer_strategy=split)
        for (world, outer), inner, k, dtype, way in itertools.product(
            MESHES, STRATEGIES, (1, 2, 3), ("fp32", "bf16", "bf16_comm"), WAYS
        )
        for split in splits(outer)
    ),
    values=lambda case: (
        (case.world_size, case.outer), (case.strategy, case.outer_strategy), case.k, case.dtype, case.optimizer
    ),
    key=lambda case: case.world_size,
)  # fmt: skip


def name_of(case: Case) -> str:
    mesh = f"{case.world_size // case.outer}x{case.outer}-{case.outer_strategy}" if case.outer > 1 else case.world_size
    return f"{mesh}-{case.strategy}-k{case.k}-{case.optimizer}-{case.dtype}"


@pytest.mark.parametrize("case", TRAININGS.params(name_of))
def test_training_equals_one_process_in_fp64(case: Case) -> None:
    ran = records(TRAININGS.batch(case))[case]
    told = wrong(case, ran)
    assert not told, "\n".join(told)
    assert len({tuple(each.norms) for each in ran}) == 1, "every rank knows the same norm"
    assert case.clip is None or min(ran[0].norms) > CLIP, "clipping must act, or the case tests nothing"


@pytest.mark.parametrize("fault", [2.0, 0.5, 1.01, 1 + 2.0**-15])
def test_the_bounds_notice_a_wrong_scale(fault: float) -> None:
    case = Case("native", "optim_grads", 2, 2, 0, "sgd", None, steps=3)
    first, *others = records((case,))[case]
    scaled = replace(first, gradients={name: gradient * fault for name, gradient in first.gradients.items()})
    assert any(told.startswith("gradient: ") for told in wrong(case, [scaled, *others]))


Group = tuple[tuple[int, int], int, str, tuple[str, str]]
"""Mesh, microbatches, model, and optimizer with dtype: all strategies, or pairs of them, are compared under each."""
ORDERED: Cover[Group] = Cover(
    itertools.product(
        MESHES, (1, 2), ("tiny", "odd"), (("adamw", "fp32"), ("sgd", "fp32"), ("adamw", "bf16"), ("adamw", "bf16_comm"))
    ),
    values=lambda group: (group[:2], *group[2:]),
    key=lambda group: group[0],
    strength=1,
)
"""Each group is run by every strategy or pair, so that a few are many trainings."""


def ordered(group: Group, strategy: str) -> list[Case]:
    """The trainings that promise the same bits."""
    (world, outer), k, model, (optimizer, dtype) = group
    usual = Case("native", strategy, world, k, 0, optimizer, CLIP, dtype, "ordered", 2, outer, model=model)
    return [replace(usual, outer_strategy=split) for split in splits(outer)]


@pytest.mark.parametrize("group", ORDERED.params())
def test_ordered_is_bitwise_where_it_claims_to_be(group: Group) -> None:
    """With one microbatch all strategies sum alike; with two, those that sum microbatches at the same place."""
    found = records(tuple(case for each in ORDERED.batch(group) for s in STRATEGIES for case in ordered(each, s)))
    for alike in [STRATEGIES] if group[1] == 1 else [STRATEGIES[:2], STRATEGIES[2:]]:
        first, *others = (case for strategy in alike for case in ordered(group, strategy))
        assert not wrong(first, found[first])
        for other in others:
            told = f"{alike[0]} and {other.strategy}, {other.outer_strategy} outside"
            assert not any(map(differences, found[first], found[other])), told


def test_the_two_groups_of_ordered_do_differ() -> None:
    """If they agreed, the test above could not tell one order of sums from the other."""
    group = ((3, 1), 2, "tiny", ("adamw", "fp32"))
    cases = [ordered(group, strategy)[0] for strategy in ("no_shard", "optim_grads")]
    one, other = (ran[0] for ran in records(tuple(cases)).values())
    assert differences(one, other)
