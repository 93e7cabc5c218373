"""Optimizers as people build, bind, call and mix them: each does what it does on one process, or says why not.

Ranks have data of their own; one process sees all of it. Programs are written once and run on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import (
    MixedPrecisionPolicy,
    ShardedModel,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORLD, WIDTH, STEPS = 2, 6, 4
WIDE = MixedPrecisionPolicy(main_params_dtype=None)
Optimizer = torch.optim.Optimizer


class Part(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Game(nn.Module):
    """A generator and a critic of two units each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make = nn.Sequential(Part(), Part())
        self.judge = nn.Sequential(Part(), Part())

    def forward(self, x: Tensor, detached: bool = False) -> Tensor:
        made = self.make(x)
        out: Tensor = self.judge(made.detach() if detached else made)
        return out


@dataclass
class World:
    """What a program gets. rank: None on one process, which runs every rank's data."""

    model: nn.Module
    module: Game
    rank: int | None

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """As `fully_shard_optimizer` does; nothing on one process."""
        return optimizer if self.rank is None else fully_shard_optimizer(_sharded(self.model), optimizer)

    def backward(self, step: int, *, sign: float = 1.0, detached: bool = False) -> float:
        """Of the mean loss over all data; the loss here."""
        total = 0.0
        for rank in range(WORLD) if self.rank is None else [self.rank]:
            loss = sign * self.model(data(step, rank), detached).square().mean()
            (loss / WORLD if self.rank is None else loss).backward()
            total += loss.item()
        return total


def _sharded(model: nn.Module) -> ShardedModel:
    assert isinstance(model, ShardedModel)
    return model


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def adamw(params: Any, **more: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, eps=1e-3, **more)


# -- programs ----------------------------------------------------------------------------------------------------------


def zero_grad_first(world: World) -> None:
    """FSDP2's order: nobody hands the optimizer over."""
    optimizer = adamw(world.model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        world.backward(step)
        optimizer.step()


def zero_grad_last(world: World) -> None:
    optimizer = torch.optim.SGD(world.module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        world.backward(step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def bound_after_sharding(world: World) -> None:
    optimizer = world.bind(adamw(world.model.parameters()))
    for step in range(STEPS):
        world.backward(step)
        optimizer.step()
        world.model.zero_grad()


def closure(world: World) -> None:
    optimizer = world.bind(adamw(world.model.parameters()))
    for step in range(STEPS):

        def again(step: int = step) -> float:
            optimizer.zero_grad()
            return world.backward(step)

        assert optimizer.step(again) is not None


def adagrad(world: World) -> None:
    optimizer = world.bind(torch.optim.Adagrad(world.model.parameters(), lr=0.1, initial_accumulator_value=0.2))
    for step in range(STEPS):
        world.backward(step)
        optimizer.step()
        optimizer.zero_grad()


class Renamed(torch.optim.RMSprop):
    """Adds settings, and steps as its parent does."""


def subclass(world: World) -> None:
    optimizer = world.bind(Renamed(world.model.parameters(), lr=0.02, momentum=0.5))
    for step in range(STEPS):
        world.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def groups_added(world: World) -> None:
    optimizer = world.bind(adamw(world.module.make.parameters()))
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(world.module.judge.parameters()), "lr": 0.01})
        world.backward(step)
        optimizer.step()
        world.model.zero_grad()  # torch would keep the gradients of parameters that no group has


def game(world: World) -> None:
    """Each phase begins with its optimizer's zero_grad; the critic's loss reaches the generator too."""
    makes, judges = _two(world)
    for step in range(STEPS):
        judges.zero_grad()
        world.backward(step)
        judges.step()
        makes.zero_grad()
        world.backward(step, sign=-1.0)
        makes.step()


def game_of_one_backward(world: World) -> None:
    makes, judges = _two(world)
    for step in range(STEPS):
        world.backward(step)
        makes.step()
        judges.step()
        makes.zero_grad()
        judges.zero_grad()


def critic_first(world: World) -> None:
    """Several steps of the critic, whose loss is cut off from the generator, before one of the generator."""
    makes, judges = _two(world)
    for step in range(STEPS):
        judges.zero_grad()
        world.backward(step, detached=True)
        judges.step()
        if step % 2:
            makes.zero_grad()
            world.backward(step, sign=-1.0)
            makes.step()


def _two(world: World) -> tuple[Optimizer, Optimizer]:
    sgd = torch.optim.SGD(world.module.judge.parameters(), lr=0.1, momentum=0.9)
    return world.bind(adamw(world.module.make.parameters())), world.bind(sgd)


PROGRAMS: dict[str, Callable[[World], None]] = {
    program.__name__: program
    for program in (
        zero_grad_first,
        zero_grad_last,
        bound_after_sharding,
        closure,
        adagrad,
        subclass,
        groups_added,
        game,
        game_of_one_backward,
        critic_first,
    )
}


def run_sharded(rank: int, program: str, strategy: str) -> dict[str, Tensor]:
    module = Game().double()
    model = fully_shard_model(module, fsdp_unit_modules=[Part], zero_dp_strategy=strategy, mixed_precision_policy=WIDE)
    PROGRAMS[program](World(model, module, rank))
    found = dict(model.full_weights())
    model.close()
    return found


@once
def plain(program: str) -> dict[str, Tensor]:
    module = Game().double()
    PROGRAMS[program](World(module, module, None))
    return {name: param.detach() for name, param in module.named_parameters()}


def run_all(rank: int, todo: tuple[tuple[str, str], ...]) -> list[dict[str, Tensor] | str]:
    found: list[dict[str, Tensor] | str] = []
    for program, strategy in todo:
        found.append(run_sharded(rank, program, strategy))
    return found


TODO = tuple((program, strategy) for program in PROGRAMS for strategy in STRATEGIES)


@once
def sharded() -> dict[tuple[str, str], Any]:
    return dict(zip(TODO, run_ranks(run_all, WORLD, TODO)[0], strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_does_what_it_does_on_one_process(program: str, strategy: str) -> None:
    assert difference(sharded()[program, strategy], program) == ""


def difference(found: dict[str, Tensor], program: str) -> str:
    off = {name: (found[name] - weight).abs().max().item() for name, weight in plain(program).items()}
    worst = max(off, key=lambda name: off[name])
    return "" if off[worst] < 1e-12 else f"{worst} is off by {off[worst]:.1e}"


# -- what is told ------------------------------------------------------------------------------------------------------


def told(rank: int) -> list[str]:
    """Where no one model is an optimizer's; and an optimizer of something else is left alone."""
    module, other = Game().double(), nn.Linear(2, 2)
    model = fully_shard_model(module, fsdp_unit_modules=[Part], mixed_precision_policy=WIDE)
    second = fully_shard_model(Game().double(), fsdp_unit_modules=[Part], mixed_precision_policy=WIDE)
    found = []
    for params in (other.parameters(), [*module.parameters(), *second.module.parameters()]):
        try:
            fully_shard_optimizer(adamw(params))
        except ValueError as error:
            found.append(str(error))
    before = other.weight.detach().clone()
    other(torch.ones(1, 2)).sum().backward()
    adamw(other.parameters()).step()
    found.append(str(torch.equal(before, other.weight)))
    model.close()
    second.close()
    return found


def test_an_optimizer_of_no_one_model_is_told() -> None:
    for none, two, same in run_ranks(told, WORLD):
        assert "no parameter of AdamW belongs to a sharded model" in none
        assert "2 sharded models: call fully_shard_optimizer(model, optimizer) once with each" in two
        assert same == "False"
