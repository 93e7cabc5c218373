"""What tests of every pair of strategies share: meshes of four ranks, a small model, its step on one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.fsdp import ShardedModel, Strategy, fully_shard
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = tuple(strategy.name for strategy in Strategy)
WIDTH = 6


@dataclass(frozen=True)
class Pair:
    """An inner strategy, and what the outer axis does: "" has none, else no_shard (HSDP) or optim (HFSDP)."""

    inner: str
    outer: str

    def __str__(self) -> str:
        return f"{self.inner}-{self.outer or 'alone'}"

    @property
    def reduces_once(self) -> bool:
        return bool(self.outer) or self.inner in STRATEGIES[:2]


PAIRS = tuple(itertools.starmap(Pair, itertools.product(STRATEGIES, ("", "no_shard", "optim"))))
COVERED = Cover(
    PAIRS, values=lambda pair: (pair.inner, pair.outer if pair.inner == "optim_grads_params" else None), strength=2
)
"""Pairs for what keeps books rather than computes: `make test` takes each strategy, and ZeRO-3 with each outer one."""


@cache
def mesh_of(outer: int, inner: int) -> DeviceMesh:
    """Made once in a process: several models share it."""
    return init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "dp"))


def arguments_of(pair: Pair, world: int = 4) -> dict[str, Any]:
    """Of `fully_shard`: one axis, or 2 x world/2. Units are not among them."""
    found: dict[str, Any] = {"zero_dp_strategy": pair.inner}
    if not pair.outer:
        return found
    names = {"device_mesh": mesh_of(2, world // 2), "dp_shard_dim": "dp", "dp_outer_dim": "outer"}
    return found | names | {"outer_dp_sharding_strategy": pair.outer}


class Block(nn.Module):
    """A residual unit of odd sizes."""

    def __init__(self, hidden: int = 9) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


class Model(nn.Module):
    """Three units of unequal size; both matrices of the root are one."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.entry = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (9, 5, 14))
        self.exit = nn.Linear(WIDTH, WIDTH, bias=False)
        self.exit.weight = self.entry.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.exit(x)
        return y


def data(step: int, index: int, rows: int = 4) -> Tensor:
    """Global microbatch `index` of a step."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1_000 * step + index))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-4)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: Sequence[int]) -> None:
    """On the data of these ranks; a plain model has those of all."""
    for index in ranks:
        (loss_of(model, data(number, index)) / len(ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


def shard(pair: Pair, module: nn.Module | None = None, **more: Any) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """A model and its optimizer under a pair."""
    module = module if module is not None else Model()
    return fully_shard(module, adamw(module), **{"fsdp_unit_modules": [Block]} | arguments_of(pair) | more)


def plain_gradients(xs: list[Tensor], scale: float, module: nn.Module | None = None) -> dict[str, Tensor]:
    """Of the sum of the losses times `scale`, in fp64."""
    module = (module if module is not None else Model()).double()
    for x in xs:
        (loss_of(module, x.double()) * scale).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def close(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of gradients that are not within sixteen roundings of fp32 of the largest of their tensor."""
    assert found.keys() == right.keys()
    return [n for n, g in right.items() if (found[n].double() - g).abs().max() > 16 * 2.0**-24 * g.abs().max()]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that do not have the same bits."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@once
def by_pair(function: Callable[..., Any], pairs: tuple[Pair, ...] = PAIRS) -> dict[Pair, list[Any]]:
    """What `function(rank, pair)` gives for each pair, by rank; four ranks, all pairs in one process group."""
    per_rank = run_ranks(over_pairs, 4, function, pairs)
    return {pair: [ran[index] for ran in per_rank] for index, pair in enumerate(pairs)}


def over_pairs(rank: int, function: Callable[..., Any], pairs: tuple[Pair, ...]) -> list[Any]:
    """One rank's part of `by_pair`."""
    return [function(rank, pair) for pair in pairs]
