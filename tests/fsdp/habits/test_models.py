"""Models that train as in one process, of which each was once silently wrong, or was refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import FSDPModule, fully_shard_model
from tests.fsdp import test_unsharded as unsharded
from tests.fsdp.checked import RANKS, each_holds, each_is_found, of_slips, said
from tests.fsdp.habits.world import (
    Block,
    Habits,
    Net,
    Run,
    alike,
    data,
    mean_square,
    training,
)
from tests.fsdp.pairs import STRATEGIES

CHECKS = Habits()
net: Any = partial(partial, Net)
"""Makes what makes a `Net`."""


# -- what models hand on, write to, and leave out ----------------------------------------------------------------------


class Positions(nn.Module):
    """Gives a part of its table: a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.table[:rows], {"transposed": self.table.t(), "gain": self.gain}


def positioned(net: Any, x: Tensor) -> Tensor:
    rows, more = net.positions(1)
    x = net.first(x)
    out: Tensor = net.second((x + rows) * more["gain"] + (x @ more["transposed"]).sum(1, keepdim=True))
    return out


class Telling(Net):
    """Returns a parameter and an input as they are."""

    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x), "weight": self.head.weight, "input": x}


def of_weight(model: nn.Module, x: Tensor) -> Tensor:
    given: dict[str, Tensor] = model(x)
    return given["out"].square().mean() + 0.1 * given["weight"].square().sum()


class Tree(Block):
    """A unit that calls itself."""

    def forward(self, x: Tensor, level: int = 0) -> Tensor:
        x = self(x, level + 1) + self(-x, level + 1) if level < 2 else x
        return super().forward(torch.tanh(x))


class Collecting(Block):
    """A unit that writes to an argument, as auxiliary losses and caches do, a loss whose backward needs its weights."""

    def forward(self, x: Tensor, bag: list[Tensor], pair: tuple[Tensor, int], *, extra: Tensor) -> Tensor:
        x = x + self.linear(x) * pair[0] + extra
        bag.append(self.out(self.linear(x)).square().mean(-1, keepdim=True))
        return x


def collected(net: Any, x: Tensor) -> Tensor:
    bag: list[Tensor] = []
    for unit in (net.first, net.second):
        x = unit(x, bag, (x, 3), extra=x)
    return 0.1 * x + 0.01 * torch.stack(bag).sum(0)


class Ignoring(Block):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return super().forward(x)


def rooted(net: Any, x: Tensor) -> Tensor:
    """The gradient of z must stay absent: sqrt(0) would make it NaN."""
    out: Tensor = net.second(net.first(net.root(x, net.z.sqrt())))
    return out


class Interrupted(Block):
    """Ctrl-C in a notebook, and on with the next cell."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return super().forward(x)


def again(model: nn.Module, x: Tensor) -> Tensor:
    try:
        return mean_square(model, x)
    except KeyboardInterrupt:
        return mean_square(model, x)


def in_parts(model: Any, x: Tensor) -> Tensor:
    """Units outside of the model's forward, right after an update."""
    with torch.no_grad():
        aim = model.first(x)
    out: Tensor = (model.second(model.first(x)) - aim).square().mean() + mean_square(model, x + aim)
    return out


OF_IGNORING = {"root": Ignoring, "z": lambda: nn.Parameter(torch.zeros(1))}
CHECKS |= {
    # a third step diverges, and rounding with it
    "handing_on": alike(net(units=(Block, Positions), positions=Positions, hidden=positioned), training(2)),
    "returning_leaves": alike(Telling, training(loss=of_weight)),
    "recursing": alike(net(first=Tree)),
    "writing_to_arguments": alike(net(units=(Collecting,), first=Collecting, second=Collecting, hidden=collected)),
    "an_unused_input_of_a_unit_called_root": alike(net(units=(Block, Ignoring), hidden=rooted, **OF_IGNORING)),
    "calling_units": alike(Net, training(loss=in_parts)),
    "interrupting": alike(net(second=Interrupted), training(loss=again)),
}


class Box:
    """Of a kind that nobody knows."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(Block):
    def forward(self, box: Any) -> Any:
        return Box(super().forward(box.held))


Boxing = net(units=(Boxed,), first=Boxed, second=Boxed, hidden=lambda net, x: net.second(net.first(Box(x))).held)


class Stopping(Block):
    """Takes a dict and gives a tensor; a weight is used detached, too, before it is used with a gradient."""

    def forward(self, given: Any) -> Any:
        detached = nn.functional.linear(given["x"], self.linear.weight.detach())
        return super().forward(torch.tanh(detached))


OF_STOPPING: dict[str, Any] = {"first": Stopping, "second": Stopping}
CHECKS["boxing"] = alike(Boxing)
CHECKS["stopping"] = alike(
    net(units=(Stopping,), hidden=lambda net, x: net.second({"x": net.first({"x": x})}), **OF_STOPPING)
)


@CHECKS.check
def boxing_in_a_double_buffer(rank: int, strategy: str) -> list[str]:
    model = fully_shard_model(Boxing(), zero_dp_strategy=strategy, fsdp_unit_modules=[Boxed], double_buffer=True)
    if strategy != STRATEGIES[3]:
        return []
    return said(lambda: model(data([rank], 0)), RuntimeError, "unit first returns no tensor .* under double_buffer")


# -- gradients of inputs -----------------------------------------------------------------------------------------------


def stopped(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = net.first(x)
    out: Tensor = net.second(before + x)
    return out


def _has_gradients(model: Any) -> bool:
    return isinstance(model, FSDPModule) and model.engine.step.has_gradients


def attacks(run: Run, times: int, *, frozen: bool) -> list[bool]:
    """Steps on inputs changed by their own gradients, which are no backwards of a step."""
    counted: list[bool] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        before = _has_gradients(model)
        model.requires_grad_(not frozen)
        for _ in range(times):
            (change,) = torch.autograd.grad(mean_square(model, x.requires_grad_()), x)
            x = (x + 0.1 * change.sign()).detach()
        model.requires_grad_(True)
        counted.append(_has_gradients(model) is not before)
        return mean_square(model, x)

    run.train(3, loss)
    return counted


CHECKS["attacking"] = alike(Net, partial(attacks, times=2, frozen=True))
CHECKS["attacking_past_a_stop"] = alike(net(hidden=stopped), partial(attacks, times=1, frozen=False))


# -- methods beside forward --------------------------------------------------------------------------------------------


@CHECKS.check
def classes(rank: int, strategy: str) -> list[str]:
    """Parameters have their own class while they are computed with, in the backward too."""
    model, optimizer = unsharded.built(strategy)
    inside: set[type] = set()
    handle = model.module.embed.register_full_backward_hook(lambda *_: inside.add(type(model.module.embed.weight)))
    for _ in range(2):
        model(unsharded.tokens_of(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    seen = set().union(*(block.seen for block in model.module.blocks))
    return [] if seen == {nn.Parameter, unsharded.Marked} and inside == {nn.Parameter} else [str(seen | inside)]


@CHECKS.check
def parts(rank: int, strategy: str) -> list[str]:
    """`generate` and a registered method against one process, on data of each rank's own, and a step through it."""
    (model, optimizer), plain, told = unsharded.built(strategy), unsharded.Net(), []
    tokens = unsharded.tokens_of(rank)
    for _ in range(2):
        told += [] if torch.equal(model.generate(tokens), plain.generate(tokens)) else ["generate"]
    model.register_forward_methods("encode", "blocks.0.forward")
    with torch.no_grad():
        told += [] if torch.equal(model.encode(tokens), plain.encode(tokens)) else ["encode"]
    model.encode(tokens).square().mean().backward()
    for other in range(RANKS):
        (plain.encode(unsharded.tokens_of(other)).square().mean() / RANKS).backward()
    found = dict(model.full_gradients())
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        told += [name] if param.requires_grad and not torch.allclose(found[name], expected, atol=1e-6) else []
    optimizer.step()
    told += [] if model.engine.memory.live_bytes == 0 else ["memory is not given back"]
    return told + said(lambda: model.register_forward_methods("nothing"), AttributeError, "'nothing'")


class Yielding(Block):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


@CHECKS.check
def yielding(rank: int, strategy: str) -> list[str]:
    """What a generator computes, it computes when the call of its unit is over."""
    model = fully_shard_model(nn.Sequential(Yielding()), zero_dp_strategy=strategy, fsdp_unit_modules=[Block])
    if strategy != STRATEGIES[0]:
        return said(lambda: next(model(data([rank], 0))), Exception, "meets a sharded one")
    return [] if next(model(data([rank], 0))).shape == (4, 6) else ["another output"]


test_a_program_is_right = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------


MUTANTS = of_slips(
    r"""
    [The engine, by habits of programs]
    views of weights: The copy of a weight that a unit hands on brings no gradient back
        fsdp.runtime.hooks.without_weights: leaf.clone(), True => leaf.clone().detach(), True
        handing_on
    hooks on leaves: A parameter among a model's outputs is watched for ever
        fsdp.runtime.backward_hooks.BackwardHooks.watch_outputs: leaves if each.grad_fn is not None => leaves
        returning_leaves / no_shard
    inputs alone: A backward of a frozen model counts as one of the step
        fsdp.runtime.backward_hooks.BackwardHooks._is_all_frozen: False
        attacking / no_shard
    hidden in a double buffer: A unit that hides its outputs may be differentiated with another unit's weights
        fsdp.runtime.hooks.Hooks._post_forward: if unit.shares_buffers and => if False and
        boxing_in_a_double_buffer
    interrupts: Nobody notices that a forward was interrupted
        fsdp.runtime.hooks.Hooks.break_off: lambda *_, **__: None
        interrupting
    [The engine, by habits of loops]
    stops: A part that ran without gradients makes a backward of a gradient of an input
        fsdp.runtime.units.Readiness.is_due: bool(self._due_params) => bool(self._due_params) or self.hidden_calls
        attacking_past_a_stop / no_shard
    [Hidden tensors]
    gradients are the end: A unit whose inputs are hidden is resharded when its weights have gradients
        fsdp.runtime.units.Readiness.is_over: self.due or self.inside or => self.due or
        stopping
    next unit waits for its outputs: A unit is unsharded only for gradients of its outputs, not of what it left behind
        fsdp.runtime.gather.GatherPipeline.unshard_next: lambda *_, **__: None
        writing_to_arguments
    [The engine, by methods beside forward]
    units alone: A unit that is called by itself computes with weights of before the update
        fsdp.runtime.hooks.Hooks.is_inside: True
        calling_units
    root let go: A forward of the model inside a method ends as one outside does
        fsdp.runtime.hooks.Hooks.in_model: False
        parts
    method as it is: A registered method runs without the root
        fsdp.runtime.hooks.Hooks.run_as_forward: if self.is_inside: => if True:
        parts
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
