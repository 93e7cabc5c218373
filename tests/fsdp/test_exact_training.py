"""Under numerics=exact a training has one set of bits, whoever runs it: every strategy, mesh, unit size and split.

Twelve microbatches a step, of one sequence each, are dealt to 1, 2, 3, 4 or 6 ranks, on one axis or on two, and run on
`single` too. Losses by global microbatch, norms and all weights must be equal to the last bit; the gradient too.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from harness.fsdp.comm.reduction import norm_from_counters, square_counters
from tests.engines.conformance.trial import Evidence, make_workload
from tests.fsdp.trial import Case, alone, batches, differences, records
from tests.support.covering import Cover

# -- the norm: equal to fp64 wherever it answers, the same bits for any split, and loud beyond its range ---------------

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "count"), [(2.0**25.9, 1 << 20), (2.0**16, 1 << 20), (0.3, 1000), (1e-9, 1000), (0.0, 3), (1.0, 0)]
)
def test_it_is_the_norm(value: float, count: int) -> None:
    counters = square_counters([torch.full((count,), value)], CPU)
    expected = float(torch.tensor(value).double()) * math.sqrt(count)
    resolution = 2.0**-75 / max(value * value, 2.0**-75)  # of a square: half a unit
    assert norm_from_counters(counters) == pytest.approx(expected, rel=1e-14 + resolution, abs=1e-30)


def test_counters_add_over_a_billion_large_elements() -> None:
    """As ranks do: the same counters, 2^10 times, stand for 2^30 elements."""
    counters = square_counters([torch.full((1 << 20,), 2.0**25.9)], CPU) * (1 << 10)
    assert norm_from_counters(counters) == pytest.approx(2.0**25.9 * 2.0**15, rel=1e-6)


def test_the_bits_do_not_depend_on_the_order_or_the_cut() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 5000)
    whole = square_counters([values], CPU)
    pieces = square_counters(list(values.flip(0).split(77)), CPU)
    assert torch.equal(whole, pieces)
    assert norm_from_counters(whole) == pytest.approx(values.double().norm().item(), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan(bad: float) -> None:
    assert math.isnan(norm_from_counters(square_counters([torch.tensor([1.0, bad, 2.0])], CPU)))


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(OverflowError, match="1 gradient elements exceed"):
        norm_from_counters(square_counters([torch.tensor([1.0, 2.0**27])], CPU))


# -- trainings ---------------------------------------------------------------------------------------------------------

M = 12
STEPS = 3
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WORLDS = (1, 2, 3, 4, 6)
OUTER = {4: (2,), 6: (2, 3)}
MESHES = tuple((world, *mesh) for world in WORLDS for mesh in [
    (1, "no_shard"), *itertools.product(OUTER.get(world, ()), ("no_shard", "optim"))
])  # fmt: skip
"""Ranks, how many of them the outer axis has, and what it does."""
TRAININGS = tuple(itertools.product(("tiny", "odd"), ("sgd", "adamw"), (None, 0.5)))
CASES = Cover(
    (  # unit sizes alternate, so that both are met with everything
        Case(
            "native", strategy, world, M // world, M, optimizer, clip, numerics="exact", steps=STEPS, model=model,
            outer=outer, outer_strategy=split, in_one_unit=bool((i + k) % 2),
        )
        for (i, (model, optimizer, clip)), strategy, (k, (world, outer, split)) in itertools.product(
            enumerate(TRAININGS), STRATEGIES, enumerate(MESHES)
        )
    ),
    values=lambda case: (
        case.world_size, case.outer, case.outer_strategy, case.strategy, case.model, case.optimizer, case.clip,
        case.in_one_unit,
    ),
    key=lambda case: case.world_size,
)  # fmt: skip


def reference(case: Case) -> Evidence:
    same = {"numerics": "exact", "steps": STEPS, "model": case.model}
    return alone(Case("single", "no_shard", 1, M, M, case.optimizer, case.clip, **same))


def joined(ranks: list[Evidence]) -> Evidence:
    """What the first rank has, and losses of all ranks in the order of microbatches."""
    losses = [[loss for rank in ranks for loss in rank.losses[step]] for step in range(STEPS)]
    return replace(ranks[0], losses=losses)


def name_of(case: Case) -> str:
    mesh = f"{case.world_size // case.outer}x{case.outer}-{case.outer_strategy}"
    training = f"{case.model}-{case.optimizer}-{'unclipped' if case.clip is None else 'clipped'}"
    return f"{mesh}-{case.strategy}-{training}-{'one unit' if case.in_one_unit else 'units'}"


@pytest.mark.parametrize("case", CASES.params(name_of))
def test_bits_do_not_depend_on_who_trains(case: Case) -> None:
    assert not differences(joined(records(CASES.batch(case))[case]), reference(case))


@pytest.mark.parametrize("model", ["tiny", "odd"])
def test_a_gradient_is_a_sum_of_integers(model: str) -> None:
    """Multiples of 2^-44 of each microbatch's gradient, added without rounding, divided and rounded once."""
    case = Case("single", "no_shard", 1, M, M, "sgd", None, numerics="exact", steps=1, model=model)
    workload, module = make_workload(case.config()), make_workload(case.config()).build("cpu", torch.float32)
    total: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(workload.initial_weight(name, param.shape))
    for batch in batches(case, 0, 1):
        module.zero_grad()
        workload.loss(module, batch).backward()
        for name, param in module.named_parameters():
            if param.grad is not None:
                integers = (param.grad.double() * 2.0**44).round().to(torch.int64)
                total[name] = total.get(name, torch.zeros_like(integers)) + integers
    for name, gradient in alone(case).gradients.items():
        right = [
            each / (M << 44) for each in total[name].flatten().tolist()
        ]  # Python divides integers with one rounding
        assert torch.equal(gradient.flatten(), torch.tensor(right, dtype=torch.float64).float()), name


def test_other_sums_have_other_bits() -> None:
    """If plain fp32 sums agreed too, the test above could not tell."""
    fast = Case("native", "optim", 3, 4, M, "adamw", 0.5, numerics="fast", steps=STEPS)
    assert differences(joined(records((fast,))[fast]), reference(fast))
