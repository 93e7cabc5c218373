"""Programs that train with torch's optimizers, run on one process and on ranks with sharded parameters."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

WORLD, TOLERANCE = 2, 1e-9
WIDE = MixedPrecisionPolicy(main_params_dtype=None)
Opt = torch.optim.Optimizer


class Block(nn.Module):
    """A unit of odd sizes, of which a forward may use the first half only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor, half: bool = False) -> Tensor:
        h: Tensor = torch.tanh(self.up(self.norm(x)))
        return h if half else x + self.down(h)


class Net(nn.Module):
    """Three units between two matrices, a scalar and a parameter of one row."""

    def __init__(self, seed: int = 0, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.entry, self.exit = nn.Linear(5, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.gain, self.row = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.ones(1, 3))

    def forward(self, x: Tensor, use: str = "all") -> Tensor:
        x = self.gain * self.entry(x)
        if use != "all":
            found: Tensor = self.blocks[0](x) if use == "block" else self.blocks[1](x, half=True)
            return found
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(x) + self.row
        return out


def data(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)


@dataclass
class World:
    """What a program gets. rank: None on one process, which runs every rank's data.

    binds: sharded optimizers are handed to `fully_shard_optimizer`.
    """

    rank: int | None
    stage: int = 3
    binds: bool = True
    batch: int = 0
    models: list[Any] = field(default_factory=list)
    optimizers: list[Opt] = field(default_factory=list)
    extras: list[Tensor] = field(default_factory=list)
    """What else must be equal."""

    def net(self, seed: int = 0, width: int = 7) -> Any:
        made: Any = Net(seed, width).double()
        if self.rank is not None:
            made = fully_shard_model(
                made, fsdp_unit_modules=[Block], zero_dp_strategy=self.stage, mixed_precision_policy=WIDE
            )
        self.models.append(made)
        return made

    def bind(self, optimizer: Any, *models: Any, compared: bool = True) -> Any:
        """Hand it over, once for each model it steps."""
        if compared:
            self.optimizers.append(optimizer)
        if self.rank is not None and self.binds:
            for model in models or self.models[:1]:
                fully_shard_optimizer(model, optimizer)
        return optimizer

    def loss(self, model: Any, use: str = "all") -> Tensor:
        """The mean over all data, of which a rank sees its own."""
        ranks = range(WORLD) if self.rank is None else [self.rank]
        return torch.stack([model(data(self.batch, rank), use).square().mean() for rank in ranks]).mean()

    def backward(
        self, model: Any, *, use: str = "all", new: bool = True, scale: Any = None, sync: bool = True
    ) -> Tensor:
        """Of the mean loss over all data; the loss here."""
        self.batch += new
        with nullcontext() if sync or self.rank is None else model.no_sync():
            loss = self.loss(model, use)
            (loss if scale is None else scale(loss)).backward()
        return loss.detach()

    def step(self, model: Any, *optimizers: Any, clip: float = 0.0, **how: Any) -> None:
        """One update by each optimizer; `how` is of `backward`."""
        self.backward(model, **how)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()

    def loop(self, model: Any, optimizer: Any, steps: int = 4, scheduler: Any = None, **how: Any) -> None:
        for _ in range(steps):
            self.step(model, optimizer, **how)
            if scheduler is not None:
                scheduler.step()


Program = Callable[[World], None]


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def far(what: str, found: Tensor, right: Tensor) -> list[str]:
    found = full(found)
    if found.shape != right.shape:
        return [f"{what}: shape {tuple(found.shape)} instead of {tuple(right.shape)}"]
    off = (found.double() - right.double()).abs().max().item() if right.numel() else 0.0
    return [] if off < TOLERANCE else [f"{what}: off by {off:.1e}"]


def differences(found: World, right: World) -> list[str]:
    """Weights, optimizer state and extras that are not what one process has. *Collective.*"""
    told: list[str] = []
    for model, plain in zip(found.models, right.models, strict=True):
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            told += far(name, param, other)
    for one, plain in zip(found.optimizers, right.optimizers, strict=True):
        mine, theirs = one.state_dict()["state"], plain.state_dict()["state"]
        groups, others = (str(each.state_dict()["param_groups"]) for each in (one, plain))
        told += [] if groups == others else [f"groups are {groups}, not {others}"]
        keys, right_keys = ({index: list(held) for index, held in each.items()} for each in (mine, theirs))
        everyones: list[Any] = [None] * WORLD
        dist.all_gather_object(everyones, [*keys.items()])
        if keys != right_keys or any(each != everyones[0] for each in everyones):
            told.append(f"state has {everyones}, not {right_keys}")
            continue
        told += [
            each
            for index, held in theirs.items()
            for key, value in held.items()
            if isinstance(value, Tensor)
            for each in far(f"{key} of {index}", mine[index][key], value)
        ]
    pairs = zip(found.extras, right.extras, strict=True)
    return told + [each for place, (a, b) in enumerate(pairs) for each in far(f"extra {place}", a, b)]


def run(rank: int, stage: int, program: Program, *, binds: bool = True) -> list[str]:
    """What is wrong with a program on ranks."""
    right, found = World(None), World(rank, stage, binds)
    program(right)
    try:
        program(found)
        return differences(found, right)
    except Exception:
        return [traceback.format_exc()]
