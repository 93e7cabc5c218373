"""A small sharded model that can be asked for what it refuses, and what is wrong with the sentence it says then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import ShardedModel, fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Net(nn.Module):
    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(max(1, vocabulary), 6), requires_grad=bool(vocabulary))
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = F.embedding(x, self.table, sparse=True)
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def data(rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


def built(strategy: str, module: nn.Module | None = None) -> tuple[ShardedModel, torch.optim.Optimizer]:
    module = module or Net()
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.1)
    return fully_shard(module, optimizer, zero_dp_strategy=strategy, fsdp_unit_modules=[Block])


def trained(model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> dict[str, Tensor]:
    for _ in range(steps):
        model(data(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.full_weights())


def said(action: Callable[[], Any], kind: type[Exception], *parts: str) -> list[str]:
    """What is wrong with the error of an action: its kind, or a part it does not say."""
    try:
        action()
    except Exception as error:
        if type(error) is not kind:
            return [f"{type(error).__name__} instead of {kind.__name__}: {error}"]
        return [f"{part!r} is not in: {error}" for part in parts if not re.search(part, str(error))]
    return [f"nothing was said of {parts}"]
