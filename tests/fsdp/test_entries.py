"""What a loop may do with a step, under every pair of strategies on four ranks: accumulate and scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from harness.fsdp import ShardedModel, StepError
from tests.fsdp.checked import each_is_found, of_slips, said
from tests.fsdp.pairs import (
    COVERED,
    STRATEGIES,
    Model,
    Pair,
    by_pair,
    close,
    data,
    loss_of,
    plain_gradients,
    same,
    shard,
)
from tests.support.spawn import run_ranks

WORLD, K = 4, 3
M = WORLD * K


def every_microbatch(step: int = 0) -> list[torch.Tensor]:
    return [data(step, index) for index in range(M)]


def own(rank: int, step: int = 0) -> list[torch.Tensor]:
    return every_microbatch(step)[rank * K : (rank + 1) * K]


def accumulate(model: ShardedModel, xs: list[torch.Tensor], how: str, scale: float) -> None:
    """All microbatches of a rank, the last of which ends the step."""
    for index, x in enumerate(xs):
        last = index == len(xs) - 1
        if how == "set_model_auto_sync":
            model.set_model_auto_sync(last)
        with {"no_sync": nullcontext if last else model.no_sync, "sync": model.sync if last else nullcontext}.get(
            how, nullcontext
        )():
            (loss_of(model, x) * scale).backward()


# -- accumulation ------------------------------------------------------------------------------------------------------


def auto_sync(rank: int, pair: Pair) -> list[list[str]]:
    """Backwards that each synchronise add to what `.grad` holds, after a step, too."""
    model, optimizer = shard(pair)
    for x in own(rank)[:2]:
        loss_of(model, x).backward()
    right = plain_gradients([data(0, r * K + j) for r in range(WORLD) for j in (0, 1)], 1 / WORLD)
    told = [close(dict(model.full_gradients()), right)]
    optimizer.zero_grad()
    accumulate(model, own(rank), "no_sync", 1 / K)
    right = plain_gradients(every_microbatch(), 1 / M)
    told.append(close(dict(model.full_gradients()), right))
    loss_of(model, own(rank)[0]).backward()
    more = plain_gradients([data(0, r * K) for r in range(WORLD)], 1 / WORLD)
    told.append(close(dict(model.full_gradients()), {name: value + more[name] for name, value in right.items()}))
    optimizer.step()
    before = dict(model.full_gradients())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    accumulate(model, own(rank), "no_sync", 1 / K)  # of weights that are zeros: nothing comes
    told.append(same(before, dict(model.full_gradients())))
    model.close()
    return told


WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "no_sync": ({}, 1 / K),
    "set_model_auto_sync": ({"grad_divisor": M}, 1.0),
    "sync": ({"calculate_per_token_loss": True, "sync_model_each_microbatch": False}, 1 / M),
}
"""Ways to accumulate, each with one to scale; `test_properties` draws the others."""


def every_way(rank: int, pair: Pair) -> dict[str, list[str]]:
    """Which gradients differ from one big batch's; and what nobody ends is refused where it is not reduced."""
    right, found = plain_gradients([torch.cat(every_microbatch())], 1.0), {}
    for how, (arguments, scale) in WAYS.items():
        model, optimizer = shard(pair, **arguments)
        accumulate(model, own(rank), how, scale)
        found[how] = close(dict(model.full_gradients()), right)
        optimizer.zero_grad()
    accumulate(model, own(rank), "never", scale)
    if pair.reduces_once:
        found["never synced"] = said(model.finish_grad_sync, StepError, "never reduced")
    else:
        found["never synced"] = close(dict(model.full_gradients()), right)
    return found


every_pair = pytest.mark.parametrize("pair", COVERED.params())


@every_pair
def test_accumulation_without_no_sync_is_right(pair: Pair) -> None:
    assert by_pair(auto_sync, COVERED.batch(pair))[pair] == [[[]] * 4] * WORLD


@every_pair
def test_each_way_to_accumulate_equals_one_big_batch(pair: Pair) -> None:
    for found in by_pair(every_way, COVERED.batch(pair))[pair]:
        assert {way: names for way, names in found.items() if names} == {}


def test_another_scale_shows() -> None:
    """1/k forgotten, applied twice, or one part in a million: the bound is a bound."""
    right = plain_gradients([torch.cat(every_microbatch())], 1.0)
    for factor in (K, 1 / K, 1 + 2.0**-19):
        assert close({name: g.float() * factor for name, g in right.items()}, right)


class Penalised(Model):
    """A root parameter that only the loss uses, so that its gradient is the first to come."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_comes_first_is_added_or_leaves_nothing_behind(strategy: str) -> None:
    """Under no_shard autograd adds the penalty's gradient to the finished one before any hook could tell."""
    assert run_ranks(penalised, 1, strategy) == [2.0 if strategy == "no_shard" else 4.0]


def penalised(rank: int, strategy: str) -> float:
    """The penalty's gradient of a second backward, or of one after the second was refused."""
    module = Penalised()
    model, optimizer = shard(Pair(strategy, ""), module)

    def backward() -> None:
        out = loss_of(model, data(0, 0))
        (out + module.penalty.square().sum()).backward()

    backward()
    if strategy == "no_shard":
        with pytest.raises(RuntimeError, match=r"penalty was added to the finished one.*call zero_grad\(\) before it"):
            backward()
        with pytest.raises(RuntimeError, match="call zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
    backward()
    found = dict(model.full_gradients())["penalty"]
    model.close()
    assert torch.equal(found, found[:1].expand(3))
    return float(found[0])


# -- mutants -----------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: lambda rank, strategy, each=each: each(rank, Pair(strategy, "")) for each in (every_way, auto_sync)
}
MUTANTS = of_slips(
    """
    tokens: calculate_per_token_loss is accepted and ignored
        fsdp.megatron.fully_shard_model: grad_divisor=grad_divisor, => grad_divisor=None,
        every_way / optim
    forgets earlier: A second synchronised backward takes the place of the first
        fsdp.runtime.gradient_sync.GradientSync._install: = self._kept, {} => = {}, {}
        auto_sync / optim
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what loops do")
