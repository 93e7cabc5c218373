"""Ranks that run different numbers of passes, or units in different orders: right, or one error on every rank that
waits, in a bounded time, naming what each waits for. Other engines hang here."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp import ShardedModel, fully_shard, fully_shard_optimizer
from tests.fsdp import pairs
from tests.fsdp.checked import each_is_found, of_slips
from tests.fsdp.pairs import STRATEGIES
from tests.support.spawn import run_ranks

LIMIT_S = 1.0
GENEROUS_S = 30.0
STEPS = 4


class Net(pairs.Model):
    """Blocks that are called in an order of choice."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.exit(x)


@dataclass
class Loop:
    """One rank's training; its habits are what rank 1 does otherwise."""

    rank: int
    net: Net
    model: ShardedModel

    def loss(self, step: int) -> Tensor:
        return self.model(pairs.data(step, self.rank)).square().mean()


def one_more_backward(loop: Loop, step: int) -> None:
    loop.loss(step + 50).backward()


def one_more_forward(loop: Loop, step: int) -> None:
    loop.loss(step + 50)


def one_more_look(loop: Loop, step: int) -> None:
    with torch.no_grad():
        loop.loss(step + 50)


def one_more_inside(loop: Loop, step: int) -> None:
    with loop.model.no_sync():
        loop.loss(step + 50).backward()


ORDERS = {"another order": (1, 0, 2), "more calls": (0, 1, 1, 1, 2)}
"""Of units in the forwards of rank 1 after the first."""


def in_order(habit: str) -> Callable[[Loop, int], None]:
    return lambda loop, _: setattr(loop.net, "order", ORDERS[habit])


HABITS: dict[str, tuple[Callable[[Loop, int], None] | None, int]] = {
    "one more backward": (one_more_backward, STEPS),
    "one more forward": (one_more_forward, STEPS),
    "one more look": (one_more_look, STEPS),
    **{habit: (in_order(habit), STEPS) for habit in ORDERS},
    "one more batch": (None, STEPS + 1),
}
"""What rank 1 does after each of its backwards, and how many steps it makes."""
INSIDE = "one more microbatch inside no_sync()"
"""What rank 1 does before each of its backwards, of which there are two elsewhere."""


def train(rank: int, habit: str, strategy: str) -> str:
    """Empty where all went well, and then both ranks have the same weights; else the error."""
    act, steps = HABITS.get(habit, (None, STEPS))
    group = dist.new_group([0, 1])
    net = Net()
    optimizer = pairs.adamw(net)
    model = fully_shard(net, group=group, unit_modules=[pairs.Block], strategy=strategy, watchdog_timeout_s=LIMIT_S)
    loop, sharded = Loop(rank, net, model), fully_shard_optimizer(model, optimizer)
    try:
        for step in range(steps if rank == 1 else STEPS):
            for _ in range(1 + rank if habit == INSIDE else 0):
                one_more_inside(loop, step)
            loop.loss(step).backward()
            if rank == 1 and act is not None:
                act(loop, step)
            sharded.step()
            sharded.zero_grad()
        weights = {name: weight.clone() for name, weight in model.full_weights()}
        model.close()
    except Exception as error:
        with suppress(RuntimeError):  # what was begun cannot end
            model.close()
        return f"{type(error).__name__}: {error}"
    expected = alone(habit)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    return ""


def alone(habit: str) -> dict[str, Tensor]:
    """Weights of one process in plain torch that has both ranks' data."""
    net = Net()
    optimizer = pairs.adamw(net)
    orders = [Net.order] * 2
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            for _ in range(1 + rank if habit == INSIDE else 0):
                (net(pairs.data(step + 50, rank)).square().mean() / 2).backward()
            net.order = orders[rank]
            (net(pairs.data(step, rank)).square().mean() / 2).backward()
        orders[1] = ORDERS.get(habit, Net.order)
        optimizer.step()
    return dict(net.named_parameters())


def of_all_strategies(rank: int, habit: str) -> tuple[dict[str, str], float]:
    began = time.monotonic()
    found = {}
    for strategy in STRATEGIES:
        found[strategy] = train(rank, habit, strategy)
        dist.barrier()
    return found, time.monotonic() - began


RIGHT = {
    "one more backward": (),
    "one more forward": ("no_shard", "optim", "optim_grads"),
    "one more look": ("no_shard", "optim", "optim_grads"),
    **dict.fromkeys(ORDERS, ("no_shard", "optim", "optim_grads")),
    "one more batch": (),
}
"""Strategies under which the habit needs nothing of other ranks."""
COUNTED = dict.fromkeys(HABITS, ()) | {"one more backward": ("no_shard", "optim_grads_params")}
"""Strategies under which the exchanges match, and the numbers in them tell that the steps do not."""


@pytest.mark.parametrize("habit", HABITS)
def test_uneven_ranks_are_right_or_told_who_waits_for_what(habit: str) -> None:
    found = run_ranks(of_all_strategies, 2, habit)
    assert max(seconds for _, seconds in found) < GENEROUS_S
    for strategy in STRATEGIES:
        told = [of_rank[strategy] for of_rank, _ in found]
        if strategy in RIGHT[habit]:
            assert told == ["", ""]
            continue
        if strategy in COUNTED[habit]:
            assert all(text.startswith("StepError: ") and "some rank ran a backward more" in text for text in told)
            continue
        (waits,) = {text for text in told if text}
        assert waits.startswith("CollectiveError")
        assert "rank 0 waits since" in waits or "rank 1 waits since" in waits
        assert "blocks." in waits or "(root)" in waits


def test_microbatches_that_are_uneven_inside_no_sync_are_right_or_told() -> None:
    """Two and three: where each is reduced, a rank's third one would meet the other's next step."""
    found = [of_rank for of_rank, _ in run_ranks(of_all_strategies, 2, INSIDE)]
    for told in found:
        assert told["no_shard"] == told["optim"] == ""
        assert told["optim_grads"] != ""
    assert any("some rank ran a backward more" in told["optim_grads_params"] for told in found)
    assert "" not in [told["optim_grads_params"] for told in found]


def _ends_otherwise(rank: int, words: str) -> str:
    told = train(rank, *words.split(", "))
    return "" if told.startswith("StepError") else told


def _nobody_counts(rank: int, strategy: str) -> str:
    told: list[str] = [""] * 2
    dist.all_gather_object(told, train(rank, INSIDE, strategy))
    return "" if any(each.startswith("StepError") for each in told) else f"{told}"


CHECKS = {"ends otherwise": _ends_otherwise, "nobody counts": _nobody_counts}
MUTANTS = of_slips(
    r"""
    steps uncounted: Two steps are summed
        fsdp.runtime.gradient_sync._read: progress.number * comm.size for each => each // _UPDATE for each
        ends otherwise / one more backward, no_shard
    backwards uncounted: A third microbatch inside no_sync() is summed with one of the other rank's next step
        fsdp.runtime.step.Progress.number: + self.backwards % 2**10 =>
        nobody counts / optim_grads_params
    first come: A unit is reduced when its gradients are ready, not when its turn comes
        fsdp.runtime.reduce.ReducePipeline.mark_ready: self._ready.add(unit.name)
            => self.order.insert(self._issued, self.order.pop(self.order.index(unit)))\n    self._ready.add(unit.name)
        ends otherwise / another order, optim_grads
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "Deadlocks")
