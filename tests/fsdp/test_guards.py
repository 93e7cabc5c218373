"""The engine's watch: gradients that are not finite, ranks that start apart, reductions that fail."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import (
    MixedPrecisionPolicy,
    Strategy,
    fully_shard,
    fully_shard_model,
)
from harness.fsdp.guards import GradientGuard
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.habits.world import same_gradients
from tests.fsdp.test_api import Block, make, sgd
from tests.support.mutants import each
from tests.support.spawn import run_ranks

STRATEGIES = [strategy.name for strategy in Strategy]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


# -- gradients that are not finite -------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """Identity whose backward puts values into places of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: dict[tuple[int, ...], float]) -> Tensor:
        ctx.values = values
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        for place, value in ctx.values.items():
            gradient[place] = value
        return gradient, None


class Poisonable(Block):
    def forward(self, x: Tensor, poison: dict[tuple[int, ...], float] | None = None) -> Tensor:
        weight = Poison.apply(self.linear.weight, poison or {})
        return x + torch.tanh(torch.nn.functional.linear(x, weight, self.linear.bias))


class Watched(nn.Module):
    """Three units; the weight of the middle one gets a poisoned gradient when asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Poisonable() for _ in range(3))
        self.poison: dict[tuple[int, ...], float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[1](self.blocks[0](x), self.poison))


@dataclass(frozen=True)
class Poisoning:
    strategy: str
    k: int
    rank: int
    microbatch: int
    """From 1."""
    values: tuple[tuple[tuple[int, ...], float], ...]
    dtype: torch.dtype = torch.float32


POISONINGS = [
    Poisoning(s, k, rank, microbatch, values, dtype)
    for s in STRATEGIES
    for k, rank, microbatch, values, dtype in (
        (1, 0, 1, (((2, 3), float("nan")),), torch.float32),
        (3, 1, 2, (((5, 0), float("inf")), ((5, 1), float("-inf"))), torch.float32),
        (2, 2, 2, (((0, 4), float("inf")), ((1, 1), float("nan")), ((4, 4), float("nan"))), torch.bfloat16),
    )
]


def poisoned_steps(rank: int, cases: list[Poisoning]) -> list[tuple[str, bool, bool]]:
    return [poisoned_step(rank, case) for case in cases]


def poisoned_step(rank: int, case: Poisoning) -> tuple[str, bool, bool]:
    """The message, whether weights stayed, and whether the next step went well."""
    model = Watched().to(case.dtype)
    wrapped, optimizer = fully_shard(
        model, sgd(model), fsdp_unit_modules=[Poisonable], zero_dp_strategy=case.strategy, report_nan_in_param_grad=True
    )

    def microbatches(poisoned: bool) -> None:
        for index in range(1, case.k + 1):
            here = poisoned and rank == case.rank and index == case.microbatch
            model.poison = dict(case.values) if here else {}
            wrapped.set_model_auto_sync(index == case.k)
            wrapped(torch.full((2, 6), 0.1 * (rank + index), dtype=case.dtype)).sum().backward()

    before = [w for _, w in wrapped.full_weights()]
    message = ""
    try:
        microbatches(poisoned=True)
    except FloatingPointError as error:
        message = str(error)
    kept = all(torch.equal(a, b) for a, (_, b) in zip(before, wrapped.full_weights(), strict=True))
    optimizer.zero_grad()
    microbatches(poisoned=False)
    optimizer.step()
    moved = all(bool(w.isfinite().all()) for _, w in wrapped.full_weights())
    wrapped.close()
    return message, kept, moved


def test_all_ranks_name_the_tensor_the_rank_and_the_microbatch() -> None:
    per_rank = run_ranks(poisoned_steps, 3, POISONINGS)
    for index, case in enumerate(POISONINGS):
        messages = {found[index][0] for found in per_rank}
        assert len(messages) == 1, "the same on all ranks"
        message = messages.pop()
        print(case.strategy, message)
        assert f"blocks.1.linear.weight on rank {case.rank} in microbatch {case.microbatch}: " in message
        kind = "NaN" if any(value != value for _, value in case.values) else "Inf"
        assert f"{kind} among 36 elements" in message
        assert "blocks.0" not in message
        assert all(found[index][1:] == (True, True) for found in per_rank), "no weight moved, and the next step is well"


@pytest.mark.parametrize("name", each("The engine, by its oracle", [("nobody looks", "Nobody looks at gradients")]))
def test_a_guard_that_does_not_look_is_found(name: str) -> None:
    with mock.patch.object(GradientGuard, "look"):
        assert run_ranks(poisoned_steps, 1, [replace(POISONINGS[0], rank=0)])[0][0][0] == ""


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("strategy", "wire"), [(1, torch.float16), (2, torch.float16), *product(STRATEGIES, [None])])
def test_what_the_wire_cannot_hold_is_found_and_a_sum_that_overflows_by_itself_is_not(strategy: Any, wire: Any) -> None:
    """1e6 is a number in fp32 and infinite in fp16."""
    model = Watched()
    wrapped = fully_shard_model(
        model,
        fsdp_unit_modules=[Poisonable],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=wire),
        report_nan_in_param_grad=True,
    )
    model.poison = {(3, 3): 1e6} if wire else {(0, 0): 3e38, (1, 1): 3e38}
    loss = wrapped(torch.ones(2, 6)).sum()
    told = "blocks.1.linear.weight .* Inf among 36"
    with pytest.raises(FloatingPointError, match=told) if wire else nullcontext():
        loss.backward()


def test_the_guard_sends_one_small_all_reduce_a_step_and_without_it_nothing() -> None:
    for found in run_ranks(traffic, 2):
        for without, with_guard in found:
            assert set(with_guard) - set(without) == {("all_reduce", "non-finite gradients", 1)}
            assert set(without) < set(with_guard)


def traffic(rank: int) -> list[list[list[tuple[str, str, int]]]]:
    """Kind, bucket and count of a step's collectives without the guard and with it, by strategy."""
    found: list[list[list[tuple[str, str, int]]]] = [[] for _ in STRATEGIES]
    for place, report in product(range(len(STRATEGIES)), (False, True)):
        model = make()
        wrapped, optimizer = fully_shard(
            model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=place, report_nan_in_param_grad=report
        )
        meter = CollectiveMeter()
        wrapped(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        found[place].append([(row.kind, row.bucket, row.count) for row in meter.take()])
        meter.close()
        wrapped.close()
    return found


# -- reductions that fail ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("group_of_one")
@every_strategy
def test_a_failed_fold_frees_its_buckets_and_its_step_cannot_be_finished(strategy: str) -> None:
    model, plain = make(), make()
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    resting = wrapped.engine.memory.live_bytes
    broken = ArithmeticError("broken fold")
    with ExitStack() as stack:
        for each in wrapped.engine.buckets:
            stack.enter_context(mock.patch.object(each.inner, "fold", side_effect=broken))
        loss = wrapped(torch.ones(2, 6)).sum()
        with pytest.raises(ArithmeticError, match="broken fold"):
            loss.backward()
        with pytest.raises(RuntimeError, match="gradients are incomplete"):
            optimizer.step()
    optimizer.zero_grad()
    assert wrapped.engine.memory.live_bytes == resting
    wrapped(torch.ones(2, 6)).sum().backward()
    plain(torch.ones(2, 6)).sum().backward()
    same_gradients(wrapped, plain)
