"""Ordinary torch programs over sharded parameters, beside those of `flat_step`, which differ in their optimizers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn.utils import clip_grad_norm_

from tests.fsdp.flat_step import more_programs
from tests.fsdp.flat_step.programs import RULES, adamw, over
from tests.fsdp.flat_step.world import Program, World, data, full

OWN: dict[str, Program] = {}
stepped = over(lambda model: adamw(model.parameters()), among=OWN)
unbound = over(lambda model: adamw(model.parameters()), among=OWN, binds=False)
"""Nobody hands the optimizer over."""


@unbound
def plain_loop(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer)


def rules_that_nobody_hands_over(world: World) -> None:
    """They step DTensors, one by a closure alone."""
    rules = {name: make for name, make in RULES.items() if name != "Rprop"}  # of a scalar it makes no DTensor
    for make in (*rules.values(), lambda p: optim.Adafactor(p, lr=0.01)):
        model = world.net()
        world.loop(model, make(model.parameters()), 2)
    model = world.net()
    lbfgs = optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        return world.backward(model)

    for _ in range(2):
        lbfgs.step(closure)  # type: ignore[arg-type] # torch declares a float


@stepped
def clipped(world: World, model: Any, optimizer: Any) -> None:
    for norm_type, foreach in itertools.product((2.0, 1.0, 3.0, float("inf")), (None, True, False)):
        world.backward(model)
        world.extras.append(clip_grad_norm_(model.parameters(), 0.3, norm_type, foreach=foreach).detach())
        optimizer.step()
        optimizer.zero_grad()


@stepped
def gradients_read_and_edited(world: World, model: Any, optimizer: Any) -> None:
    named = dict(model.named_parameters())
    for use in ("all", "block", "all"):
        world.backward(model, use=use)
        world.extras += [p.grad.norm() for p in model.parameters() if p.grad is not None]
        world.extras += [torch.tensor([p.grad is None for p in model.parameters()])]
        named["blocks.0.up.weight"].grad.mul_(0.5)
        named["entry.weight"].grad = named["entry.weight"].grad * 2 + 0.01
        named["entry.bias"].grad = None
        optimizer.step()
        optimizer.zero_grad()


@stepped
def gradients_kept(world: World, model: Any, optimizer: Any) -> None:
    """Of one loss while those of another one come, and after the step; forgotten in every way there is."""
    ways = (optimizer.zero_grad, model.zero_grad, lambda: [setattr(p, "grad", None) for p in model.parameters()])
    for place, (forget, views) in enumerate(itertools.product(ways, (False, True))):
        world.backward(model)
        kept = [p.grad.detach() if views else p.grad for p in model.parameters()]
        forget()
        world.extras += [full(each.norm()) for each in kept]
        world.backward(model)
        for param, one in zip(model.parameters(), kept, strict=True):
            param.grad.add_(one, alpha=0.5)
        if place == 0:
            weight = model.get_parameter("exit.weight")
            weight.grad = weight.grad * 2
        optimizer.step()
        forget()
        world.extras += [full(each).clone() for each in kept]


@unbound
def accumulated(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(3):
        world.backward(model, sync=False)
        world.step(model, optimizer)


@stepped
def raised_and_went_on(world: World, model: Any, optimizer: Any) -> None:
    world.loop(model, optimizer, 1)
    broken = world.loss(model)
    broken.register_hook(_fail)
    try:
        broken.backward()
    except ArithmeticError:
        optimizer.zero_grad()
    world.loop(model, optimizer, 2)


def _fail(_: Tensor) -> None:
    raise ArithmeticError


@stepped
def averaged(world: World, model: Any, optimizer: Any) -> None:
    """An average swapped in, looked at, and swapped out; torch's, and a copy of the parameters that stays as it was."""
    params = [*model.parameters()]
    ema = [p.detach().clone() for p in params]
    for _ in range(3):
        world.loop(model, optimizer, 1)
        with torch.no_grad():
            for mean, param in zip(ema, params, strict=True):
                mean.lerp_(param, 0.1)
            kept = copy.deepcopy(params)
            for param, mean in zip(params, ema, strict=True):
                param.copy_(mean)
            world.extras.append(model(data(7, 7)))
            for param, value in zip(params, kept, strict=True):
                param.data = value.detach()
    world.extras += ema


@unbound
def clamped(world: World, model: Any, optimizer: Any) -> None:
    for _ in range(3):
        world.loop(model, optimizer, 1)
        for param in model.parameters():
            param.data.clamp_(-0.2, 0.2)
    world.extras = [p.detach().norm() for p in model.parameters()]


@stepped
def saved_and_loaded(world: World, model: Any, optimizer: Any) -> None:
    """Whole weights and the optimizer's state, taken up where they were saved."""
    module = model if world.rank is None else model.module
    world.loop(model, optimizer, 2)
    weights = {name: full(value).clone() for name, value in module.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    world.loop(model, optimizer, 1)
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    world.loop(model, optimizer, 1)


@unbound
def hooked(world: World, model: Any, optimizer: Any) -> None:
    """Hooks hung on parameters that are sharded see a rank's own gradient, and change what is summed."""
    seen: list[float] = []
    model.get_parameter("exit.weight").register_hook(lambda grad: (seen.append(grad.shape.numel()), grad * 3)[1])
    model.get_parameter("exit.bias").register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    world.loop(model, optimizer)
    world.extras = [torch.tensor(seen)]


@unbound
def edited_whole(world: World, model: Any, optimizer: Any) -> None:
    """Whole weights in a context, between steps."""
    for _ in range(3):
        world.loop(model, optimizer, 1)
        with nullcontext() if world.rank is None else model.unsharded(), torch.no_grad():
            for place in range(3):
                weight = model.get_parameter(f"blocks.{place}.up.weight")
                weight.div_(weight.norm())


@over(lambda model: optim.SGD(model.parameters(), lr=0.01), among=OWN)
def penalties(world: World, model: Any, optimizer: Any) -> None:
    """Of all weights, added to a rank's loss, multiplied with it, and mixed with it otherwise."""
    head = model.get_parameter("exit.weight")
    forms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda loss, total: loss + 0.01 * total,
        lambda loss, total: loss * (1 + 0.01 * total),
        lambda loss, total: torch.lerp(loss, total.sqrt(), 0.1),
        lambda loss, total: torch.stack([loss, 0.01 * total]).sum(),
        lambda loss, total: (0.01 * total).add_(loss),
        lambda loss, total: loss + 0.1 * head.square().sum(),
        lambda loss, total: loss + 0.1 * (head.norm(dim=1).sum() + head.amax() + (head.t() @ head).sum()),
        lambda loss, total: loss + 0.1 * head.abs().mean(),
    ]
    for form in forms:
        total: Any = sum(p.square().sum() for p in model.parameters())
        total = total + torch.stack([p.norm() for p in model.parameters()]).sum()
        world.backward(model, scale=lambda loss, form=form, total=total: form(loss, total))
        world.extras.append(full(total).detach())
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = {name.replace("_", " "): program for name, program in OWN.items()} | {
    "rules that nobody hands over": rules_that_nobody_hands_over,
    "further backward": more_programs.PROGRAMS["zeros_and_two_microbatches"],
    "bound loop": more_programs.PROGRAMS["AdamW"],
    "frozen for a while": more_programs.PROGRAMS["frozen_in_turn"],
}
