"""The engine against one process in fp64: every strategy, rank count, microbatch count, optimizer, clipping on and off.

Tolerances come from the dtype, not from the engine: `single` in the engine's dtype makes every rounding a correct
engine makes but the order of its sums, so a correct engine is about as far from fp64 as `single` is. A tensor may be
`SLACK` times as far, with a floor of a few roundings where `single` happens to hit the fp64 value.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.fsdp.trial import KEPT, Case, Record, run_cases
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

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
IN_16_BITS = Cover(
    (
        Case("native", strategy, world_size, 2, 0, "adamw", CLIP, dtype, steps=3)
        for world_size, strategy, dtype in itertools.product((1, 2, 3, 4), STRATEGIES, ("bf16", "bf16_comm"))
    ),
    values=lambda case: (case.world_size, case.strategy, case.dtype),
    key=lambda case: case.world_size,
)


@once
def alone(case: Case) -> Record:
    return run_ranks(run_cases, 1, [case])[0][0]


def reference(case: Case, dtype: str) -> Record:
    """One process, which knows nothing of strategies and ranks."""
    return alone(case.reference(dtype))


@once
def records(cases: tuple[Case, ...]) -> dict[Case, Record]:
    """Cases of one world size, in one process group."""
    return dict(zip(cases, run_ranks(run_cases, cases[0].world_size, list(cases))[0], strict=True))


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
    return f"{case.world_size}ranks-{case.strategy}-k{case.k}-{case.optimizer}-{clip}-{case.dtype}"


@pytest.mark.parametrize("case", TRAININGS.params(name_of))
def test_training_equals_one_process_in_fp64(case: Case) -> None:
    record = records(TRAININGS.batch(case))[case]
    check(record)
    if case.clip is not None:
        assert min(record.norms) > CLIP, "clipping must act, or the case tests nothing"


@pytest.mark.parametrize("case", IN_16_BITS.params(name_of))
def test_bf16_policies_stay_within_bf16(case: Case) -> None:
    check(records(IN_16_BITS.batch(case))[case])


@pytest.mark.parametrize("fault", [2.0, 0.5, 1.01, 1 + 2.0**-15])
def test_the_bounds_notice_a_wrong_scale(fault: float) -> None:
    case = Case("native", "optim_grads", 2, 2, 0, "sgd", None, steps=3)
    record = records((case,))[case]
    wrong = Record(
        record.case, {n: g * fault for n, g in record.gradients.items()}, record.weights, record.losses, record.norms
    )
    with pytest.raises(AssertionError, match="gradient of"):
        check(wrong)


Group = tuple[int, int, str, str]
ORDERED: Cover[Group] = Cover(
    (
        (world_size, k, optimizer, dtype)
        for world_size, k, (optimizer, dtype) in itertools.product(
            (1, 2, 3, 4), (1, 2), (("adamw", "fp32"), ("sgd", "fp32"), ("adamw", "bf16"), ("adamw", "bf16_comm"))
        )
    ),
    key=lambda group: group[0],
)
"""World size, microbatches, optimizer and dtype that the strategies are compared under."""


def ordered(group: Group, strategy: str) -> Case:
    world_size, k, optimizer, dtype = group
    return Case("native", strategy, world_size, k, 0, optimizer, CLIP, dtype, "ordered", 2)


def same_bits(a: Record, b: Record) -> bool:
    """Everything recorded is equal bit for bit."""
    tensors = all(torch.equal(a.gradients[n], b.gradients[n]) for n in a.gradients) and all(
        torch.equal(a.weights[s][n], b.weights[s][n]) for s in a.weights for n in a.weights[s]
    )
    return tensors and a.losses == b.losses and a.norms == b.norms


@pytest.mark.parametrize("group", ORDERED.params())
def test_ordered_is_bitwise_where_it_claims_to_be(group: Group) -> None:
    """With one microbatch all strategies sum alike; with two, those that sum microbatches at the same place."""
    found = records(tuple(ordered(each, strategy) for each in ORDERED.batch(group) for strategy in STRATEGIES))
    for alike in [STRATEGIES] if group[1] == 1 else [STRATEGIES[:2], STRATEGIES[2:]]:
        first = found[ordered(group, alike[0])]
        for strategy in alike[1:]:
            assert same_bits(first, found[ordered(group, strategy)]), f"{alike[0]} and {strategy}"


def test_the_two_groups_of_ordered_do_differ() -> None:
    """If they agreed, the test above could not tell one order of sums from the other."""
    group = (3, 2, "adamw", "fp32")
    found = records(tuple(ordered(group, strategy) for strategy in ("no_shard", "optim_grads")))
    assert not same_bits(*found.values())
