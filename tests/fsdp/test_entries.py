"""What a loop may do with a step, under every pair of strategies on four ranks: accumulate and scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.fsdp import ShardedModel
from tests.fsdp.checked import each_is_found, of_slips
from tests.fsdp.pairs import (
    COVERED,
    PAIRS,
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
        if how == "no_sync" and not last:
            with model.no_sync():
                (loss_of(model, x) * scale).backward()
        elif how == "sync" and last:
            with model.sync():
                (loss_of(model, x) * scale).backward()
        else:
            if how == "set_model_auto_sync":
                model.set_model_auto_sync(last)
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


def every_way(rank: int, pair: Pair) -> dict[str, list[str]]:
    """Each way to accumulate with each to scale."""
    return ways(rank, pair, whole=True)


def ways(rank: int, pair: Pair, whole: bool = False) -> dict[str, list[str]]:
    """Ways to accumulate and to scale against one big batch; which gradients differ.

    Each way to scale meets one of those to accumulate, with the next pair of strategies the other; `whole`: both.
    """
    right = plain_gradients([torch.cat(every_microbatch())], 1.0)
    found = {}
    scalings: dict[str, tuple[dict[str, Any], float]] = {
        "loop": ({}, 1 / K),
        "divisor": ({"grad_divisor": M}, 1.0),
        "tokens": ({"calculate_per_token_loss": True}, 1 / M),
    }
    for place, (scaling, (arguments, scale)) in enumerate(scalings.items(), start=PAIRS.index(pair)):
        hows = ("no_sync", "set_model_auto_sync")
        for how in hows if whole else hows[place % 2 :][:1]:
            model, _ = shard(pair, **arguments)
            accumulate(model, own(rank), how, scale)
            found[f"{scaling} {how}"] = close(dict(model.full_gradients()), right)
            model.close()
    model, optimizer = shard(pair, sync_model_each_microbatch=False, grad_divisor=M)
    accumulate(model, own(rank), "sync", 1.0)
    found["sync"] = close(dict(model.full_gradients()), right)
    optimizer.zero_grad()
    for x in own(rank):
        loss_of(model, x).backward()
    try:
        found["never synced"] = close(dict(model.full_gradients()), right)
        found["never synced"] += ["was not refused"] if pair.reduces_once else []
    except RuntimeError as error:
        found["never synced"] = [] if pair.reduces_once and "never reduced" in str(error) else [str(error)]
    model.close()
    return found


every_pair = pytest.mark.parametrize("pair", COVERED.params())


@every_pair
def test_accumulation_without_no_sync_is_right(pair: Pair) -> None:
    assert by_pair(auto_sync, COVERED.batch(pair))[pair] == [[[]] * 4] * WORLD


@pytest.mark.parametrize("tried", [ways, pytest.param(every_way, marks=pytest.mark.full)], ids=["few", "all"])
@every_pair
def test_each_way_to_accumulate_and_scale_equals_one_big_batch(pair: Pair, tried: Callable[..., Any]) -> None:
    for found in by_pair(tried, COVERED.batch(pair))[pair]:
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
        fsdp.runtime.gradient_sync.GradientSync._install: = self._kept, [] => = [], []
        auto_sync / optim
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what loops do")
