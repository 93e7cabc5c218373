"""An optimizer's state before its first step: what a checkpoint is loaded into, and no step needs to be faked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state torch would create in its first step: zeros, and a step count of 0.

    State then has the same keys and bytes before the first step as after it, and the first update is unchanged.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            held = optimizer.state[param]
            for entry in entries_of(optimizer, group):
                if held.get(entry) is None:
                    held[entry] = _blank(entry, group, param)


def entries_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what SGD, Adam and AdamW (an Adam to torch) keep of every parameter; of others nothing is known."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("step", "exp_avg", "exp_avg_sq") if isinstance(optimizer, torch.optim.Adam) else ()


def _blank(entry: str, group: Mapping[str, Any], param: Tensor) -> Tensor:
    if entry != "step":
        return torch.zeros_like(param, requires_grad=False)
    return torch.zeros((), dtype=torch.float32, device=param.device if group["fused"] else "cpu")
