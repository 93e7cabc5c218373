"""Backwards of every shape: when a unit's gradients are complete, and which programs are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import MegatronModel, Strategy, fully_shard, fully_shard_model
from tests.fsdp.habits.world import same_gradients
from tests.fsdp.test_api import Block, make, sgd

STRATEGIES = [strategy.name for strategy in Strategy]
RESIDENT = STRATEGIES[:3]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


pytestmark = pytest.mark.usefixtures("group_of_one")


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Branching(nn.Module):
    """Half of it is used; which half is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return x + torch.tanh((self.left if left else self.right)(x))


class Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(Branching() for _ in range(depth))
        self.unused = Branching()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, lefts: list[bool]) -> Tensor:
        for branch, left in zip(self.branches, lefts, strict=True):
            x = branch(x, left)
        return self.head(x)


class Regularised(nn.Module):
    """The loss uses a unit's weight again, outside its forward and before it in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make()

    def forward(self, x: Tensor) -> Tensor:
        early = (x @ self.body[1].linear.weight).tanh()
        return self.body(early).square().sum()


class Force(nn.Module):
    """A unit that differentiates inside its forward."""

    def __init__(self, differentiate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.differentiate = differentiate

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.differentiate(torch.tanh(self.linear(x)), x)


class Energy(nn.Module):
    def __init__(self, differentiate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.force, self.last = Block(), Force(differentiate), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.force(self.first(x)))


class Across(Energy):
    """Differentiates through a unit that has run already, in the forward of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.force.differentiate(hidden, x))


def by_grad(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


def by_grad_again(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def by_backward(y: Tensor, x: Tensor) -> Tensor:
    y.sum().backward(retain_graph=True)
    return torch.zeros_like(x)


def agree(strategy: str, build: Callable[[], nn.Module], run: Callable[[Any, Any], Any]) -> MegatronModel:
    """Assert that gradients are those of the plain module after `run`, which gets a model, and the module in it."""
    module, plain = build(), build()
    units = [Block, Branching, Force]
    wrapped = fully_shard_model(module, fsdp_unit_modules=units, zero_dp_strategy=strategy)
    run(wrapped, module)
    run(plain, plain)
    same_gradients(wrapped, plain)
    return wrapped


def backward_of(model: nn.Module, *args: Any, **how: Any) -> None:
    model(x_of(3, 6), *args).square().sum().backward(**how)


def to_the_head_alone(model: nn.Module, module: nn.Module) -> None:
    loss = model(x_of(3, 6)).square().sum()
    loss.backward(inputs=[module[2].weight])


Program = tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]
PROGRAMS: dict[str, Program] = {
    "to a parameter of the root alone": (make, to_the_head_alone),
    "forces from an energy": (lambda: Energy(by_grad), lambda model, _: backward_of(model)),
    "forces from an energy, differentiable": (lambda: Energy(by_grad_again), lambda model, _: backward_of(model)),
}
"""The last two differentiate inside the forward of a unit, whose weights are there and whose graph is one call's."""


@pytest.mark.parametrize("program", PROGRAMS)
@every_strategy
def test_gradients_are_those_of_plain_torch(strategy: str, program: str) -> None:
    agree(strategy, *PROGRAMS[program])


@pytest.mark.parametrize("strategy", RESIDENT)
def test_a_parameter_used_outside_its_unit_is_waited_for(strategy: str) -> None:
    agree(strategy, Regularised, lambda model, _: model(x_of(3, 6)).backward())


@every_strategy
def test_units_used_by_half_leave_as_early_as_whole_ones(strategy: str) -> None:
    """Six units of which half gets no gradient, behind one that gets none: still two buckets at a time."""
    lefts = [True, False, False, True, True, False]
    wrapped = agree(strategy, lambda: Tree(6), lambda model, _: backward_of(model, lefts))
    root, *units = (bucket.layout.bucket_numel * 4 for bucket in wrapped.engine.buckets)
    stage = STRATEGIES.index(strategy)
    assert wrapped.engine.counters()["transient_peak_bytes"] <= (2 * max(units) + root) * ((stage >= 2) + (stage == 3))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "differentiate"),
    [(Across, by_grad), (Across, by_grad_again), (Across, by_backward), (Energy, by_backward)],
)
@every_strategy
def test_a_backward_inside_a_forward_is_refused(
    strategy: str, module: type[Energy], differentiate: Callable[[Tensor, Tensor], Tensor]
) -> None:
    model, plain = module(differentiate), module(lambda y, x: x)
    wrapped, optimizer = fully_shard(model, sgd(model), fsdp_unit_modules=[Block, Force], zero_dp_strategy=strategy)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside the forward of the model"):
            wrapped(x_of(3, 6).requires_grad_())
    with pytest.raises(RuntimeError, match="last backward raised"):
        wrapped.finish_grad_sync()
    optimizer.zero_grad()
    model.force.differentiate = plain.force.differentiate
    for each in (wrapped, plain):
        each(x_of(3, 6)).square().sum().backward()
    same_gradients(wrapped, plain)


@every_strategy
def test_a_backward_inside_the_forward_of_a_unit_called_by_itself_is_refused(strategy: str) -> None:
    wrapped = fully_shard_model(Energy(by_backward), fsdp_unit_modules=[Block, Force], zero_dp_strategy=strategy)
    with pytest.raises(RuntimeError, match="inside the forward of force"):
        wrapped.module.force(x_of(3, 6).requires_grad_())


@every_strategy
def test_differentiating_a_backward_is_refused_by_name(strategy: str) -> None:
    wrapped, plain = fully_shard_model(make(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy), make()
    x = x_of(3, 6).requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        wrapped(x).sum().backward(create_graph=True)
    wrapped.zero_grad()
    for each in (wrapped, plain):
        each(x_of(3, 6)).square().sum().backward()
    same_gradients(wrapped, plain)
