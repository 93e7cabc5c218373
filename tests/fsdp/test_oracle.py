"""The engine against one process in fp64: every strategy, mesh, microbatch count, optimizer, clipping on and off; and
strategies and pairs of them against each other, to the bit.

Tolerances come from the dtype, not from the engine: `single` in the engine's dtype makes every rounding a correct
engine makes but the order of its sums, so a correct engine is about as far from fp64 as `single` is. A tensor may be
`SLACK` times as far, with a floor of a few roundings where `single` happens to hit the fp64 value.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.fsdp.trial import KEPT, Case, Record, alone, differences, records
from tests.support.covering import Cover

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SLACK = 4.0
FLOOR_ROUNDINGS = 8.0
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9, "bf16_comm": 2.0**-9}
CLIP = 0.5  # below the norms that occur, so that it acts


TRAININGS = Cover(
    (
        Case("native", strategy, world_size, k, 0, optimizer, clip)
        for world_size, strategy, k, optimizer, clip in itertools.product(
            (1, 2, 3, 4), STRATEGIES, (1, 2, 3), ("sgd", "adamw"), (None, CLIP)
        )
    ),
    values=lambda case: (case.world_size, case.strategy, case.k, case.optimizer, case.clip),
    key=lambda case: case.world_size,
)
OUTER = ("no_shard", "optim")
MESHES = ((4, 2), (4, 4), (6, 3))
"""Ranks, and how many of them the outer axis has: 2x2, 1x4, 2x3."""
ON_TWO_AXES = Cover(
    (
        Case("native", inner, world, k, 0, *way, dtype, "fast", 3, outer=outer, outer_strategy=split)
        for (world, outer), inner, split, k, dtype, way in itertools.product(
            MESHES, STRATEGIES, OUTER, (1, 2), ("fp32", "bf16_comm"), (("sgd", None), ("adamw", CLIP))
        )
    ),
    values=lambda case: (
        (case.world_size, case.outer), case.strategy, case.outer_strategy, case.k, case.dtype, case.optimizer
    ),
    key=lambda case: case.world_size,
)  # fmt: skip
IN_16_BITS = Cover(
    (
        Case("native", strategy, world_size, 2, 0, "adamw", CLIP, dtype, steps=3)
        for world_size, strategy, dtype in itertools.product((1, 2, 3, 4), STRATEGIES, ("bf16", "bf16_comm"))
    ),
    values=lambda case: (case.world_size, case.strategy, case.dtype),
    key=lambda case: case.world_size,
)


def reference(case: Case, dtype: str) -> Record:
    """One process, which knows nothing of strategies and ranks."""
    return alone(case.reference(dtype))


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of `a` to the fp64 value `b`."""
    return ((a.double() - b).norm() / b.norm()).item()


def check(record: Record) -> None:
    case = record.case
    unit = UNIT[case.dtype]
    exact = reference(case, "fp64")
    peer = reference(case, "fp32" if case.dtype == "fp32" else "bf16")
    for name, gradient in exact.gradients.items():
        bound = SLACK * max(distance(peer.gradients[name], gradient), FLOOR_ROUNDINGS * unit)
        assert distance(record.gradients[name], gradient) <= bound, f"gradient of {name} at step 1"
    for step in KEPT[1:]:
        for name in exact.weights.get(step, {}):
            moved = exact.weights[step][name] - exact.weights[0][name]
            if not moved.any():  # frozen
                assert torch.equal(record.weights[step][name], record.weights[0][name]), f"update of {name}"
                continue
            ours = record.weights[step][name].double() - exact.weights[0][name]
            theirs = peer.weights[step][name].double() - exact.weights[0][name]
            # the weights themselves are rounded to the main dtype: their unit is fp32's in every policy
            rounding = 2.0**-24 * (exact.weights[step][name].norm() / moved.norm()).item()
            bound = SLACK * max(distance(theirs, moved), FLOOR_ROUNDINGS * unit, rounding * step)
            assert distance(ours, moved) <= bound, f"update of {name} after step {step}"
    for step, (norm, right) in enumerate(zip(record.norms, exact.norms, strict=True), 1):
        bound = SLACK * max(abs(peer.norms[step - 1] / right - 1), FLOOR_ROUNDINGS * unit * step)
        assert abs(norm / right - 1) <= bound, f"gradient norm at step {step}"


def name_of(case: Case) -> str:
    clip = "unclipped" if case.clip is None else "clipped"
    mesh = f"{case.world_size // case.outer}x{case.outer}-{case.outer_strategy}" if case.outer > 1 else case.world_size
    return f"{mesh}-{case.strategy}-k{case.k}-{case.optimizer}-{clip}-{case.dtype}"


@pytest.mark.parametrize(
    ("cover", "case"),
    [
        pytest.param(cover, *each.values, marks=each.marks, id=each.id)
        for cover in (TRAININGS, ON_TWO_AXES, IN_16_BITS)
        for each in cover.params(name_of)
    ],
)
def test_training_equals_one_process_in_fp64(cover: Cover[Case], case: Case) -> None:
    ran = records(cover.batch(case))[case]
    check(ran[0])
    assert len({tuple(each.norms) for each in ran}) == 1, "every rank knows the same norm"
    if cover is TRAININGS and case.clip is not None:
        assert min(ran[0].norms) > CLIP, "clipping must act, or the case tests nothing"


@pytest.mark.parametrize("fault", [2.0, 0.5, 1.01, 1 + 2.0**-15])
def test_the_bounds_notice_a_wrong_scale(fault: float) -> None:
    case = Case("native", "optim_grads", 2, 2, 0, "sgd", None, steps=3)
    (record, _) = records((case,))[case]
    wrong = Record(
        record.case, {n: g * fault for n, g in record.gradients.items()}, record.weights, record.losses, record.norms
    )
    with pytest.raises(AssertionError, match="gradient of"):
        check(wrong)


Group = tuple[int, int, int, str, str]
"""World size, its outer axis, microbatches, optimizer, dtype: strategies, or pairs of them, are compared under each."""
ORDERED: Cover[Group] = Cover(
    (
        (world_size, 1, k, optimizer, dtype)
        for world_size, k, (optimizer, dtype) in itertools.product(
            (1, 2, 3, 4), (1, 2), (("adamw", "fp32"), ("sgd", "fp32"), ("adamw", "bf16"), ("adamw", "bf16_comm"))
        )
    ),
    key=lambda group: group[0],
)
ORDERED_PAIRS: Cover[Group] = Cover(
    (
        (world_size, outer, k, "adamw", dtype)
        for (world_size, outer), dtype, k in itertools.product(MESHES, ("fp32", "bf16_comm"), (1, 2))
    ),
    key=lambda group: group[:2],
    strength=1,
)
"""Each group is run by every pair, so that a few are many trainings."""


def ordered(group: Group, strategy: str) -> list[Case]:
    """The trainings that promise the same bits."""
    world_size, outer, k, optimizer, dtype = group
    splits = OUTER if outer > 1 else OUTER[:1]
    steps = 3 if outer > 1 else 2
    return [
        Case(
            "native", strategy, world_size, k, 0, optimizer, CLIP, dtype, "ordered", steps, outer=outer,
            outer_strategy=split,
        )
        for split in splits
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cover", "group"),
    [
        pytest.param(cover, *each.values, marks=each.marks, id=each.id)
        for cover in (ORDERED, ORDERED_PAIRS)
        for each in cover.params()
    ],
)
def test_ordered_is_bitwise_where_it_claims_to_be(cover: Cover[Group], group: Group) -> None:
    """With one microbatch all strategies sum alike; with two, those that sum microbatches at the same place."""
    found = records(tuple(case for each in cover.batch(group) for s in STRATEGIES for case in ordered(each, s)))
    for alike in [STRATEGIES] if group[2] == 1 else [STRATEGIES[:2], STRATEGIES[2:]]:
        first, *others = (found[case] for strategy in alike for case in ordered(group, strategy))
        if cover is ORDERED_PAIRS:
            check(first[0])
        for other in others:
            case = other[0].case
            told = f"{alike[0]} and {case.strategy}, {case.outer_strategy} outside"
            assert not any(differences(mine, its) for mine, its in zip(first, other, strict=True)), told
            assert len({tuple(each.norms) for each in other}) == 1, "every rank knows the same norm"


def test_the_two_groups_of_ordered_do_differ() -> None:
    """If they agreed, the test above could not tell one order of sums from the other."""
    group = (3, 1, 2, "adamw", "fp32")
    cases = [ordered(group, strategy)[0] for strategy in ("no_shard", "optim_grads")]
    one, other = (ran[0] for ran in records(tuple(cases)).values())
    assert differences(one, other)
