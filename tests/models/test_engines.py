"""Both families on the engine and in one process, against plain torch in fp64: the awkward cases reach every strategy.

Gradients of step 1 tell a wrong reduction; norms of all steps and the updates after the third tell stale, untied or
decayed weights. Bounds are roundings of the dtype, against the tensor's own size or a thousandth of the whole
gradient's, whichever is larger: a gain's gradient is a sum that cancels.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.models.registry import workload_for
from tests.fsdp.trial import Record, run_cases
from tests.models.families import STEPS, Case, filled, plain_run
from tests.support.covering import once
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MODELS = ("odd", "odd_units", "moe")
ROUNDINGS = 64
UPDATE = 2e-4
"""Relative error of three updates: Adam with eps = 1e-4 stretches a gradient's rounding, and no fault is this small."""
UNIT = {"fp32": 2.0**-24, "fp64": 2.0**-53}


def cases(world_size: int) -> list[Case]:
    """Every strategy with two microbatches a rank; one of them in fp64, where rounding hides nothing."""
    pairs = [*itertools.product(("odd", "moe"), STRATEGIES), *itertools.product(["odd_units"], STRATEGIES[::3])]
    found = [Case("native", strategy, world_size, 2, model=model) for model, strategy in pairs]
    return found + [Case("native", STRATEGIES[-1], world_size, 1, model=model, dtype="fp64") for model in MODELS]


def name_of(case: Case) -> str:
    return f"{case.world_size}ranks-{case.model}-{case.strategy}-k{case.k}-{case.dtype}"


@once
def outcomes(world_size: int) -> dict[Case, Record]:
    return dict(zip(cases(world_size), run_ranks(run_cases, world_size, cases(world_size))[0], strict=True))


@cache
def reference(model: str, world_size: int, k: int) -> Record:
    return plain_run(Case("single", world_size=world_size, k=k, model=model))


@cache
def rounded(model: str, world_size: int, k: int) -> Record:
    """Plain torch in fp32: what a processor's kernels are off by, where sums cancel, is no fault of sharding."""
    return plain_run(Case("single", world_size=world_size, k=k, model=model), torch.float32)


@cache
def initial(model: str) -> dict[str, Tensor]:
    built = filled(workload_for(Case(model=model).config()))
    return {name: weight.detach() for name, weight in built.named_parameters()}


def check(found: Record, case: Case) -> None:
    right, unit = reference(case.model, case.world_size, case.k), UNIT[case.dtype]
    start = initial(case.model)
    assert list(found.gradients) == list(right.gradients), "trained parameters, in model order"
    assert list(found.weights[STEPS]) == list(right.weights[STEPS]), "all parameters, tied ones once"
    whole = right.norms[0]
    for name, gradient in right.gradients.items():
        error = (found.gradients[name].double() - gradient).norm()
        bound = ROUNDINGS * unit * (gradient.norm() + 1e-3 * whole)
        if error > bound and case.dtype == "fp32":
            plain = rounded(case.model, case.world_size, case.k).gradients[name]
            bound = 2 * (plain.double() - gradient).norm()
        assert error <= bound, f"gradient of {name}"
    for norm, expected in zip(found.norms, right.norms, strict=True):
        assert norm == pytest.approx(expected, rel=1e-5 if case.dtype == "fp32" else 1e-11)
    for name, weight in right.weights[STEPS].items():
        moved = weight - start[name]
        if name not in right.gradients:
            assert torch.equal(found.weights[STEPS][name].double(), start[name]), f"{name} is frozen"
            continue
        error = (found.weights[STEPS][name].double() - weight).norm()
        slack = UPDATE if case.dtype == "fp32" else 1e-9
        assert error <= slack * moved.norm() + 2 * unit * weight.norm(), f"update of {name}"
    squares = sum(weight.double().square().sum().item() for weight in found.weights[STEPS].values())
    assert found.facts["weight_norm"] == pytest.approx(squares**0.5, rel=1e-12), "each weight counted once"


@pytest.mark.parametrize("case", [*cases(2), *cases(3)], ids=name_of)
def test_sharded_training_is_plain_training(case: Case) -> None:
    check(outcomes(case.world_size)[case], case)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_plain_training(model: str) -> None:
    case = Case("single", k=4, model=model, dtype="fp64")
    check(run_ranks(run_cases, 1, [case])[0][0], case)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_do_not_use_the_same_parameters(world_size: int) -> None:
    """What the cases above are about: within a step some microbatches leave a parameter out that others use."""
    for model, part in (("odd", ".side."), ("odd_units", ".side."), ("moe", ".experts.")):
        case = Case(world_size=world_size, k=2, model=model)
        workload = workload_for(case.config())
        built = filled(workload, torch.float32)
        patterns = []
        for number in range(1, STEPS + 1):
            used = []
            for batch in case.step(number):
                built.zero_grad(set_to_none=True)
                workload.loss(built, batch).backward()
                used.append({n for n, w in built.named_parameters() if part in n and w.grad is not None})
            patterns.append([set().union(*used[rank * 2 : rank * 2 + 2]) for rank in range(world_size)])
        assert any(len({frozenset(each) for each in ranks}) > 1 for ranks in patterns), model


def test_the_bounds_notice_a_fault() -> None:
    """A factor, a lost tie, a frozen weight that moved: on outcomes that pass."""
    case = Case("native", "optim", 2, 2, model="odd")
    right = reference("odd", 2, 2)
    norm = sum(weight.square().sum().item() for weight in right.weights[STEPS].values()) ** 0.5
    good = replace(right, facts={"weight_norm": norm})
    check(good, case)
    for change in (
        "gradients:blocks.1.gain",
        "gradients:cells",
        "weights:embedding.weight",
        "weights:frozen.linear.bias",
    ):
        kind, _, name = change.partition(":")
        tensors = dict(right.gradients if kind == "gradients" else right.weights[STEPS])
        tensors[name] = tensors[name] * 1.001
        with pytest.raises(AssertionError):
            check(replace(good, **{kind: tensors if kind == "gradients" else {STEPS: tensors}}), case)
