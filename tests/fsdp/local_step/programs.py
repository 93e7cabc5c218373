"""The programs: optimizers as people build, call and mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from tests.fsdp.local_step.world import Program, World, full

Make = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def adamw(params: Any, **more: Any) -> optim.AdamW:
    return optim.AdamW(params, **{"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3, **more})


def over(make: Make, *, binds: bool = True, among: dict[str, Program] = PROGRAMS) -> Callable[[Any], Any]:
    """Register a program that gets a model and what `make` makes of that, handed over where it `binds`."""

    def register(function: Callable[[World, Any, Any], None]) -> Callable[[World, Any, Any], None]:
        def trains(world: World) -> None:
            world.binds = binds
            model = world.net()
            function(world, model, world.bind(make(model)))

        among[function.__name__] = trains
        return function

    return register


def two(model: Any) -> list[dict[str, Any]]:
    """Groups of matrices, and of the rest."""
    params = [*model.parameters()]
    rest = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    return [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}, rest]


stepped = over(lambda model: adamw(model.parameters()))
grouped = over(lambda model: adamw(two(model)))


def _rule(make: Make, **more: Any) -> Program:
    def trains(world: World) -> None:
        model = world.net()
        world.loop(model, world.bind(make(model.parameters())), **more)

    return trains


class Renamed(optim.AdamW):
    """Inherits the rule."""


class Decaying(optim.AdamW):
    """Has a rule of its own, which reads norms of whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - 0.001 * param.norm())
        return super().step(closure)


class Lamb(optim.Optimizer):
    """Scales the update of a parameter by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # as programs write it
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                held = self.state[param]
                if not held:
                    held["m"] = torch.zeros_like(param)
                held["m"].mul_(0.9).add_(param.grad, alpha=0.1)
                param.sub_(held["m"] * (param.norm() / (held["m"].norm() + 1e-6)) * group["lr"])


RULES: dict[str, Make] = {
    "AdamW": adamw,
    "AdamW foreach": lambda p: adamw(p, foreach=True),
    "AdamW one by one": lambda p: adamw(p, foreach=False),
    "AdamW fused": lambda p: adamw(p, fused=True),
    "AdamW amsgrad": lambda p: adamw(p, amsgrad=True),
    "AdamW maximize": lambda p: adamw(p, maximize=True),
    "AdamW, lr a tensor": lambda p: adamw(p, lr=torch.tensor(0.05)),
    "Adam": lambda p: optim.Adam(p, lr=0.05, eps=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampened": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, eps=1e-3),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.05, eps=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05, eps=1e-3),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05, eps=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05, eps=1e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "subclass": lambda p: Renamed(p, lr=0.05, eps=1e-3),
    "subclass with its own step": lambda p: Decaying(p, lr=0.05, eps=1e-3),
    "LAMB": Lamb,
}
PROGRAMS.update({name: _rule(make) for name, make in RULES.items()})
PROGRAMS["clipped"] = _rule(adamw, clip=0.3)


# -- closures ----------------------------------------------------------------------------------------------------------


@stepped
def closure(world: World, model: Any, optimizer: Any) -> None:

    def again() -> Tensor:
        optimizer.zero_grad()
        assert len(optimizer.param_groups[0]["params"]) == len([*model.parameters()])
        return world.backward(model)

    for _ in range(4):
        assert isinstance(optimizer.step(again), Tensor)


# -- edits -------------------------------------------------------------------------------------------------------------


def _sam(assign: bool) -> Program:
    def sam(world: World) -> None:
        model = world.net()
        optimizer = world.bind(optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        params = [*model.parameters()]
        for _ in range(4):
            world.backward(model)
            old = [param.data.clone() for param in params]
            with torch.no_grad():
                norm = torch.stack([full(param.grad.norm()) for param in params]).norm()
                for param in params:
                    param.add_(param.grad * (0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            world.backward(model, new=False)
            for param, value in zip(params, old, strict=True):
                if assign:
                    param.data = value
                else:
                    param.data.copy_(value)
            optimizer.step()
            optimizer.zero_grad()

    return sam


PROGRAMS["SAM, copied back"], PROGRAMS["SAM, assigned back"] = _sam(assign=False), _sam(assign=True)


@grouped
def lookahead_and_average(world: World, model: Any, optimizer: Any) -> None:
    """Slow weights live in the optimizer's state; an average in place over the groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    average = [param.detach().clone() for param in params]
    for step in range(6):
        world.step(model, optimizer)
        with torch.no_grad():
            for param in params:
                held = optimizer.state[param]
                if "slow" not in held:
                    held["slow"] = param.detach().clone()
                elif step % 2:
                    held["slow"].add_(param - held["slow"], alpha=0.5)
                    param.data.copy_(held["slow"])
            torch._foreach_lerp_(average, params, 0.1)
    world.extras = average


# -- gradients ---------------------------------------------------------------------------------------------------------


@stepped
def zeros_and_two_microbatches(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(4):
        world.backward(model)
        world.backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@stepped
def zeros_of_the_model(world: World, model: Any, optimizer: Any) -> None:
    """Zeros decay weights and momentum, of parameters without a gradient in the next backward, too."""
    for step in range(4):
        world.backward(model, use=("all", "block")[step % 2])
        optimizer.step()
        model.zero_grad(set_to_none=False)
        optimizer.step()


@stepped
def unused_in_turn(world: World, model: Any, optimizer: Any) -> None:
    for step in range(9):
        world.step(model, optimizer, use=("all", "block", "half")[step % 3])


@stepped
def frozen_in_turn(world: World, model: Any, optimizer: Any) -> None:
    names = dict(model.named_parameters())
    for step in range(6):
        for name in ("blocks.1.up.weight", "entry.bias"):
            names[name].requires_grad_(step not in (0, 1, 4))
        world.step(model, optimizer)


@stepped
def frozen_after_the_forward(world: World, model: Any, optimizer: Any) -> None:
    """torch accumulates nothing for what is frozen when the backward comes to it, nor for what was in the forward."""

    def switch(*frozen: bool) -> None:
        for name, each in zip(("blocks.0.up.weight", "blocks.1.up.weight"), frozen, strict=True):
            model.get_parameter(name).requires_grad_(not each)

    for _ in range(4):
        switch(True, False)
        world.step(model, optimizer, scale=lambda loss: (switch(False, True), loss)[1])


@stepped
def frozen_between_microbatches(world: World, model: Any, optimizer: Any) -> None:
    """What came before a parameter was frozen counts."""
    for _ in range(3):
        world.backward(model, sync=False)
        model.get_parameter("blocks.1.up.weight").requires_grad_(False)
        world.step(model, optimizer)
        model.get_parameter("blocks.1.up.weight").requires_grad_(True)


@stepped
def replaced(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(4):
        world.backward(model)
        for param in model.parameters():
            param.grad = param.grad * 0.5 + 0.01
        optimizer.step()
        optimizer.zero_grad()


@stepped
def given_without_a_backward(world: World, model: Any, optimizer: Any) -> None:
    """Gradients that the program makes: of this parameter's cut, and whole on every rank."""
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 * (step + 1)).requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
    world.loop(model, optimizer, 1)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.2).requires_grad_(False)
    optimizer.step()
    optimizer.step()
    world.backward(model)  # which is added
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    world.loop(model, optimizer, 1)


@stepped
def whole_gradients(world: World, model: Any, optimizer: Any) -> None:
    """A gradient that is replicated, as arithmetic over whole tensors gives it."""
    for _ in range(3):
        world.backward(model)
        for param in (each for each in model.parameters() if each.dim() == 2):
            param.grad = (param.grad.t() * 0.5).t()
        optimizer.step()
        optimizer.zero_grad()
