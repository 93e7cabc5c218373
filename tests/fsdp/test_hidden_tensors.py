"""Units that take and give tensors where no hook looks, with frozen weights used early and trained ones late."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import Strategy, fully_shard_model
from tests.fsdp.checked import RANKS, each_is_found, of_slips
from tests.fsdp.ordinary.pieces import CARRIES
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = [strategy.name for strategy in Strategy]
DIM, LAYERS = 8, 4


class Parcel:
    """An object with its tensor out of sight."""

    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = lambda: inside


CARRIED = CARRIES | {"object": (Parcel, lambda parcel: parcel.inside())}


class Block(nn.Module):
    """Its frozen layer comes first, so that a backward needs it after the trained one has its gradient."""

    def __init__(self, way: str, frozen: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(DIM, DIM).requires_grad_(frozen == "nothing")
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Any) -> Any:
        put, take = CARRIED[self.way]
        h = take(x)
        return put(h + torch.tanh(self.last(torch.tanh(self.first(h)))))


class AuxiliaryBlock(Block):
    """Leaves a loss of its own behind, whose backward needs its weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.loss = self.last(self.first(h)).square().mean()
        return h


class AttributeBlock(Block):
    """Takes its input from a shelf, and leaves its output and a loss of its own there."""

    def __init__(self, shelf: list[Tensor], frozen: str) -> None:
        super().__init__("tensor", frozen)
        self.shelf = shelf

    def forward(self) -> None:
        h = super().forward(self.shelf.pop())
        self.loss = h.square().mean()
        self.shelf.append(h)


class Chain(nn.Module):
    def __init__(self, way: str, frozen: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.shelf = way, []
        self.inward, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        make = {
            "attribute": lambda: AttributeBlock(self.shelf, frozen),
            "aux": lambda: AuxiliaryBlock("tensor", frozen),
        }
        self.blocks = nn.ModuleList(make.get(way, lambda: Block(way, frozen))() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        if self.way == "attribute":
            self.shelf.append(h)
            for block in self.blocks:
                block()
            return self.head(self.shelf.pop()) + sum(block.loss for block in self.blocks)
        put, take = CARRIED.get(self.way, CARRIED["tensor"])
        packed = put(h)
        for block in self.blocks:
            packed = block(packed)
        out = self.head(take(packed))
        return out + sum(block.loss for block in self.blocks) if self.way == "aux" else out


def x_of(rank: int, number: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * rank + number))


@dataclass(frozen=True)
class Case:
    way: str
    frozen: str
    strategy: str
    habit: str
    double_buffer: bool

    def __str__(self) -> str:
        return "-".join((self.way, self.frozen, self.strategy, self.habit, "double"[: 6 * self.double_buffer]))


def _once(model: Callable[[Tensor], Tensor], rank: int) -> None:
    model(x_of(rank, 0)).square().mean().backward()


def _two_forwards_first(model: Callable[[Tensor], Tensor], rank: int) -> None:
    one, two = (model(x_of(rank, number)).square().mean() for number in range(2))
    (one + two).backward()


def _looks_between(model: Callable[[Tensor], Tensor], rank: int) -> None:
    """An evaluation with gradients on, and one without, between a forward and its backward."""
    loss = model(x_of(rank, 0)).square().mean()
    model(x_of(rank, 1))
    with torch.no_grad():
        model(x_of(rank, 2))
    loss.backward()


HABITS = {"once": _once, "two forwards first": _two_forwards_first, "looks between": _looks_between}
WAYS, FROZEN = (*CARRIED, "attribute", "aux"), ("linear", "nothing")
CASES = Cover(
    (Case(*point) for point in product(WAYS, FROZEN, STRATEGIES, HABITS, (False, True))),
    values=lambda case: (
        (case.way, case.strategy == "optim_grads_params", case.double_buffer),
        case.frozen,
        case.strategy,
        case.habit,
    ),
)
Found = dict[str, Tensor] | str
"""Gradients, or what was raised."""


def train_all(rank: int, cases: tuple[Case, ...]) -> dict[Case, Found]:
    return {case: train(rank, case) for case in cases}


def train(rank: int, case: Case) -> Found:
    wrapped = fully_shard_model(
        Chain(case.way, case.frozen),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=case.strategy,
        fsdp_double_buffer=case.double_buffer,
        watchdog_timeout_s=30.0,
    )
    try:
        HABITS[case.habit](wrapped, rank)
        return dict(wrapped.full_gradients())
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        wrapped.close()


@once
def trained(cases: tuple[Case, ...]) -> dict[Case, Found]:
    return run_ranks(train_all, RANKS, cases)[0]


@cache
def reference(way: str, frozen: str, habit: str) -> dict[str, Tensor]:
    """Summed over ranks and divided by their number, in one process."""
    plain = Chain(way, frozen)
    for rank in range(RANKS):
        HABITS[habit](plain, rank)
    return {n: p.grad / RANKS for n, p in plain.named_parameters() if p.grad is not None}


def check(case: Case, found: dict[str, Tensor] | str) -> None:
    assert not isinstance(found, str), found
    expected = reference(case.way, case.frozen, case.habit)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, n=name: f"{n}: {text}")


def check_refused(found: Found) -> None:
    assert isinstance(found, str)
    assert re.match("a third unit's weights are wanted while both buffers are in use", found)


def hides_all(case: Case) -> bool:
    """Whether a unit's weights would have to stay from its forward on, and have no room for that."""
    return case.way in ("object", "attribute") and case.strategy == "optim_grads_params" and case.double_buffer


@pytest.mark.parametrize("case", CASES.params())
def test_gradients_are_those_of_one_process(case: Case) -> None:
    found = trained(CASES.batch(case))[case]
    if hides_all(case):
        check_refused(found)
    else:
        check(case, found)


def finds(rank: int, words: str) -> list[str]:
    way, habit, *double = words.split(", ")
    case = Case(way, "linear", "optim_grads_params", habit, bool(double))
    check(case, train(rank, case))
    return []


CHECKS = {"finds": finds}
MUTANTS = of_slips(
    """
    order is not asked: A unit whose inputs no hook sees is released when its last gradient has come
        fsdp.runtime.readiness.Readiness.enter: lambda *_, **__: None
        finds / dict, once
    next unit waits for its outputs: A unit is unsharded only for gradients of its outputs, not of what it left behind
        fsdp.runtime.gather.GatherPipeline.unshard_next: lambda *_, **__: None
        finds / aux, once
    unseen units are released: A unit of which neither inputs nor outputs can be seen is released after its forward
        fsdp.runtime.gather.GatherPipeline.keep: lambda *_, **__: None
        finds / object, once
    resting units stay: A unit between two of its calls in one backward keeps the buffer that another one needs
        fsdp.runtime.backward_hooks.BackwardHooks._call_passed: BackwardHooks._end_if_over
        finds / tensor, two forwards first, double
    """
)
test_a_wrong_engine_is_found = each_is_found(__name__, MUTANTS, "Hidden tensors")
