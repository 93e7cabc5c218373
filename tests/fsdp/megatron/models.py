"""A model under megatron-fsdp's entries, its optimizer, and the same steps in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.fsdp import MegatronModel, fully_shard_model, fully_shard_optimizer
from tests.fsdp.checked import RANKS
from tests.fsdp.pairs import Block, Model, data, loss_of

LR = 0.05


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """It shows the scale of a gradient, which Adam hides."""
    return torch.optim.SGD(module.parameters(), lr=LR)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, eps=1e-4)


def sharded(strategy: str, module: nn.Module | None = None, **more: Any) -> MegatronModel:
    module = Model() if module is None else module
    return fully_shard_model(module, zero_dp_strategy=strategy, **{"fsdp_unit_modules": [Block]} | more)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def with_optimizer(
    strategy: str, make: Make = sgd, module: nn.Module | None = None, **more: Any
) -> tuple[MegatronModel, torch.optim.Optimizer]:
    """Built as upstream's users do: over the sharded model's parameters, and given alone."""
    model = sharded(strategy, module, **more)
    return model, fully_shard_optimizer(make(model))


def plainly(steps: int, factor: float = 1.0, make: Make = sgd) -> nn.Module:
    """The same steps in one process, gradients multiplied by a factor."""
    module = Model()
    optimizer = make(module)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(module, data(step, rank)) * factor / RANKS).backward()
        optimizer.step()
    return module


def differs(model: MegatronModel, plain: nn.Module) -> list[str]:
    """Names of weights that are not those of a plain module, up to rounding."""
    right = {name: param.detach() for name, param in plain.named_parameters()}
    found = dict(model.full_weights())
    return [name for name, value in right.items() if not torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)]
