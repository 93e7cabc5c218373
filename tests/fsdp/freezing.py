"""Programs that freeze parameters between steps or leave some unused, on one process and sharded.

A program is written once. One process sees all data. Decay and momentum move what has a gradient of zero, so that the
weights tell what was updated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from tests.fsdp.pairs import Pair, arguments_of
from tests.fsdp.unused import WIDTH, Branch, Half
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORLD, STEPS = 4, 5
OTHER = 7
"""Columns of adapters: another row length, so that a bucket has several segments."""
fp32, fp64, bf16 = torch.float32, torch.float64, torch.bfloat16


class Part(nn.Module):
    """A unit with an adapter that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OTHER), nn.Linear(OTHER, WIDTH)
        self.adapts = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.adapts:
            y = y + self.up(self.down(x))
        out: Tensor = x + torch.tanh(y)
        return out


class Net(nn.Module):
    """Three units and a root; the first two units are a generator, the last one and the head judge."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, detached: bool = False) -> Tensor:
        x = self.entry(x)
        for place, part in enumerate(self.parts):
            x = part(x.detach() if place == 2 and detached else x)
        out: Tensor = self.head(x)
        return out

    @property
    def maker(self) -> list[nn.Module]:
        return [self.entry, *self.parts[:2]]

    @property
    def judge(self) -> list[nn.Module]:
        return [self.parts[2], self.head]

    @property
    def adapters(self) -> list[nn.Module]:
        return [module for part in self.parts for module in (part.down, part.up)]


def set_trained(modules: Iterable[nn.Module], trained: bool) -> None:
    for module in modules:
        module.requires_grad_(trained)


@dataclass(frozen=True)
class Trial:
    """A training. dtype: of the weights that are computed with. more: further arguments of `fully_shard_model`."""

    pair: Pair
    program: str
    k: int = 1
    dtype: torch.dtype = fp64
    more: tuple[tuple[str, Any], ...] = ()
    policy: MixedPrecisionPolicy | None = None

    def __str__(self) -> str:
        named = "-".join(f"{name}={value}" for name, value in self.more)
        return f"{self.pair}-{self.program}-k{self.k}-{self.dtype}-{named}".replace("torch.", "")


@dataclass
class Kept:
    """weights: after each step. stateless: parameters with rows here of which the optimizer keeps nothing."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stateless: set[str] = field(default_factory=set)

    def moved(self) -> list[set[str]]:
        """Names of weights that each step changed."""
        pairs = itertools.pairwise(self.weights)
        return [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairs]


At = Callable[[int], None]


def ignore(_: int) -> None:
    """Do nothing."""


class World:
    """What a program gets: on one process (`trial` None) or on a rank."""

    def __init__(self, program: str, k: int, rank: int | None, trial: Trial | None) -> None:
        self.k, self.rank, self.count = k, rank, k * WORLD
        self.dtype = fp64 if trial is None else trial.dtype
        _, net, freeze = PROGRAMS[program]
        self.module: Any = net().to(self.dtype)
        freeze(self.module)
        self.model: Any = self.module
        self.is_sharded = trial is not None
        self.kept = Kept()
        if trial is not None:
            wide = MixedPrecisionPolicy(main_params_dtype=torch.promote_types(fp32, trial.dtype))
            more = {"mixed_precision_policy": trial.policy or wide, **arguments_of(trial.pair, WORLD)}
            self.model = fully_shard_model(self.module, fsdp_unit_modules=[Part, Branch], **more, **dict(trial.more))

    def bind(self, optimizer: torch.optim.Optimizer, **more: Any) -> torch.optim.Optimizer:
        return fully_shard_optimizer(self.model, optimizer, **more) if self.is_sharded else optimizer

    def backward(self, step: int, *, detached: bool = False, before: At = ignore, after: At = ignore) -> None:
        """All microbatches of a step; `before` and `after` a forward are told which of its rank's it is."""
        mine = range(self.count) if self.rank is None else range(self.rank * self.k, (self.rank + 1) * self.k)
        wide = torch.promote_types(fp32, self.dtype)
        for place, index in enumerate(mine):
            before(place % self.k)
            how = (detached,) if isinstance(self.module, Net) else (step, index, self.count - 1)
            loss = self.model(data(step, index).to(self.dtype), *how).to(wide).square().mean()
            after(place % self.k)
            accumulates = self.is_sharded and place < self.k - 1
            with self.model.no_sync() if accumulates else nullcontext():
                (loss / (self.count if self.rank is None else self.k)).backward()

    def keep(self) -> None:
        named = self.model.full_weights() if self.is_sharded else self.module.named_parameters()
        self.kept.weights.append({name: weight.detach().clone() for name, weight in named})


def data(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, WIDTH, generator=generator, dtype=fp64)


def adamw(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.3, eps=1e-3, **more)


def params_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [param for module in modules for param in module.parameters()]


def step_with(world: World, optimizer: torch.optim.Optimizer, step: int, **more: Any) -> None:
    optimizer.zero_grad()
    world.backward(step, **more)
    optimizer.step()
    world.keep()


# -- programs ----------------------------------------------------------------------------------------------------------


def gan(world: World) -> None:
    """The judge is frozen while the maker is trained, and the other way round."""
    make = world.bind(adamw(params_of(world.module.maker)))
    judge = world.bind(torch.optim.SGD(params_of(world.module.judge), lr=0.05, momentum=0.9, weight_decay=0.3))
    for step in range(STEPS):
        set_trained(world.module.judge, False)
        step_with(world, make, step)
        set_trained(world.module.judge, True)
        set_trained(world.module.maker, False)
        step_with(world, judge, step, detached=True)
        set_trained(world.module.maker, True)


def one_frozen_in_turn(world: World) -> None:
    """One optimizer over all; each step another part of a unit is frozen, in odd steps all of a unit."""
    optimizer = world.bind(adamw(world.module.parameters()))
    for step in range(STEPS):
        part = world.module.parts[step % 3]
        frozen: nn.Module = part if step % 2 else part.down
        frozen.requires_grad_(False)
        step_with(world, optimizer, step)
        frozen.requires_grad_(True)


def frozen_for_good(world: World) -> None:
    """Trained at first; momentum and decay must stop."""
    optimizer = world.bind(torch.optim.SGD(world.module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.3))
    for step in range(STEPS):
        if step == 2:
            set_trained([world.module.entry, world.module.parts[1]], False)
        step_with(world, optimizer, step)


def freezing_after_the_forward(world: World) -> None:
    """torch accumulates nothing for what is frozen when the backward comes to it; nor for what was in the forward."""
    optimizer = world.bind(adamw(world.module.parameters()))
    for step in range(STEPS):
        step_with(world, optimizer, step, before=lambda _: early(world.module), after=lambda _: late(world.module))


def early(module: Net) -> None:
    module.requires_grad_(True)
    module.parts[0].requires_grad_(False)


def late(module: Net) -> None:
    module.parts[0].requires_grad_(True)
    module.parts[1].requires_grad_(False)
    module.head.bias.requires_grad_(False)


def freezing_between_microbatches(world: World) -> None:
    """What came before a parameter was frozen counts."""
    optimizer = world.bind(adamw(world.module.parameters()))

    def switch(place: int) -> None:
        world.module.parts[1].requires_grad_(place > 0)
        world.module.parts[2].requires_grad_(place == 0)

    for step in range(STEPS):
        step_with(world, optimizer, step, before=switch)


def adapters_alone(world: World) -> None:
    """PEFT: reference passes with adapters off and flags switched, as disable_adapter() does."""
    optimizer = world.bind(adamw([p for p in world.module.parameters() if p.requires_grad]))

    def reference(step: int, gradients: bool) -> None:
        for part in world.module.parts:
            part.adapts = False
        set_trained(world.module.adapters, False)
        with torch.set_grad_enabled(gradients):
            world.kept.references.append(world.model(data(step, 0).to(world.dtype)).detach().clone())
        set_trained(world.module.adapters, True)
        for part in world.module.parts:
            part.adapts = True

    for step in range(STEPS):
        reference(step, step % 2 == 0)
        step_with(world, optimizer, step, after=lambda place, s=step: reference(s, s % 3 == 0) if not place else None)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3, eps=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.3, eps=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, weight_decay=0.3, eps=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.3, eps=1e-3),
}
"""Each with decay and, where it has one, momentum."""


def unused(name: str, world: World) -> None:
    """A model of which every step leaves something unused."""
    optimizer = world.bind(OPTIMIZERS[name](world.module.parameters()))
    world.keep()
    for step in range(STEPS):
        optimizer.zero_grad()
        world.backward(step)
        grads = [p.grad for p in world.module.parameters() if p.grad is not None]
        norm = world.model.grad_norm() if world.is_sharded else nn.utils.get_total_norm(grads)
        world.kept.norms.append(float(norm))
        optimizer.step()
        world.keep()
    named = world.module.named_parameters()
    world.kept.stateless = {name for name, param in named if not optimizer.state.get(param)}


def nothing(module: nn.Module) -> None:
    module.requires_grad_(True)


def all_but_adapters(module: Net) -> None:
    module.requires_grad_(False)
    set_trained(module.adapters, True)


PROGRAMS: dict[str, tuple[Callable[[World], None], Callable[[], nn.Module], Callable[[Any], None]]] = {
    "gan": (gan, Net, nothing),
    "one frozen in turn": (one_frozen_in_turn, Net, nothing),
    "frozen for good": (frozen_for_good, Net, nothing),
    "freezing after the forward": (freezing_after_the_forward, Net, nothing),
    "freezing between microbatches": (freezing_between_microbatches, Net, nothing),
    "adapters alone": (adapters_alone, Net, all_but_adapters),
}
FREEZING = tuple(PROGRAMS)
PROGRAMS |= {f"unused, {name}": (partial(unused, name), Half, nothing) for name in OPTIMIZERS}


@once
def run_plain(program: str, k: int) -> Kept:
    world = World(program, k, None, None)
    PROGRAMS[program][0](world)
    return world.kept


def run_sharded(rank: int, trial: Trial) -> Kept:
    world = World(trial.program, trial.k, rank, trial)
    PROGRAMS[trial.program][0](world)
    world.model.close()
    return world.kept


def run_all(rank: int, trials: tuple[Trial, ...]) -> list[Kept]:
    return [run_sharded(rank, trial) for trial in trials]


@once
def sharded(trials: tuple[Trial, ...]) -> list[list[Kept]]:
    """By rank and trial."""
    return run_ranks(run_all, WORLD, trials)


def difference(found: Kept, trial: Trial) -> str:
    """What is not as on one process, or nothing: values, and what each step moved."""
    right = run_plain(trial.program, trial.k)
    for step, (ours, theirs) in enumerate(zip(found.weights, right.weights, strict=True)):
        off = {name: (ours[name] - weight).abs().max().item() for name, weight in theirs.items()}
        worst = max(off, key=lambda name: off[name])
        if not off[worst] <= (1e-5 if trial.dtype is fp32 else 1e-12):
            return f"{worst} after step {step} off by {off[worst]:.1e}"
    return "" if found.moved() == right.moved() else f"moved {found.moved()}, not {right.moved()}"


def differences(rank: int, trial: Trial) -> str:
    """Of a run on ranks."""
    return difference(run_sharded(rank, trial), trial)
