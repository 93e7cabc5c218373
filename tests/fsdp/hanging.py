"""A small model that can be stopped in a forward, and what a rank was told when another did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import ShardedModel, fully_shard, fully_shard_optimizer
from tests.fsdp.test_api import Block, sgd

LIMIT_S = 1.0
GENEROUS_S = 20.0
"""On a loaded machine; alone it takes 2 to 5 seconds."""


class Stoppable(nn.Module):
    """Three units; `stop` is called in the forward of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stop: Callable[[], None] = lambda: None
        self.blocks[1].register_forward_pre_hook(lambda *_: self.stop())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(
    group: dist.ProcessGroup | None, strategy: str, **kwargs: Any
) -> tuple[Stoppable, ShardedModel, torch.optim.Optimizer]:
    model = Stoppable()
    optimizer = sgd(model)
    wrapped = fully_shard(model, group=group, unit_modules=[Block], strategy=strategy, **kwargs)
    return model, wrapped, fully_shard_optimizer(wrapped, optimizer)


def step(wrapped: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Told:
    error: str
    message: str
    seconds: float


def provoke(action: Callable[[], None]) -> Told:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic() - began)
    return Told("", "", time.monotonic() - began)


def agree(told: list[Told]) -> str:
    """One error on all ranks, in time."""
    assert {each.error for each in told} == {"CollectiveError"}, told
    assert len({each.message for each in told}) == 1, told
    assert max(each.seconds for each in told) < GENEROUS_S
    print(told[0].seconds, told[0].message)
    return told[0].message
