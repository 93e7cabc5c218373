"""Which of torch's kernels step a group's stretches, where the user leaves that open.

[Note: Kernels over stretches] A stretch is one flat tensor. torch's default on a CPU steps it by a dozen operations,
each of which walks through it; on CUDA, by as many kernels. The fused kernel walks once. So where a group of Adam or
AdamW says neither `fused` nor `foreach`, the engine takes that one. It leaves alone what gains nothing (SGD walks once
anyway, or twice), what has no fused kernel on every device, and SGD with momentum, whose fused kernel cannot begin a
stretch later than others. The bitwise modes keep their rule: `exact` steps unfused as one process does, and so does
`ordered` where a segment cannot be cut at whole vectors (see [Note: Bits and cuts]). What is saved has the user's own
setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.vocabulary import Numerics

KERNELS = ("fused", "foreach")
"""Settings of a group that choose kernels."""


def chosen_for(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], numerics: Numerics, *, fusable: bool
) -> dict[str, bool]:
    """Settings that the engine gives a group in place of its own; none where it leaves the choice as it is.

    Args:
        fusable: every segment of the model may be cut anywhere without a change of bits.
    """
    if numerics is Numerics.exact or (numerics.bitwise and not fusable):
        return {name: False for name in KERNELS if name in group}
    is_adam = isinstance(optimizer, torch.optim.Adam)
    return {"fused": True} if is_adam and _is_open(group) and _takes_fused(group) else {}


def named(group: Mapping[str, Any]) -> str:
    """Which kernels a group is stepped with."""
    if not any(name in group for name in KERNELS) or all(group.get(name) is None for name in KERNELS):
        return "the optimizer's default"
    return next((name for name in KERNELS if group.get(name)), "one tensor at a time")


def _is_open(group: Mapping[str, Any]) -> bool:
    """Whether the user has left the choice to others."""
    return all(name in group and group[name] is None for name in KERNELS)


def _takes_fused(group: Mapping[str, Any]) -> bool:
    """Whether the fused kernel does what the group asks for."""
    asks = group.get("differentiable") or group.get("capturable")
    return not asks and not any(isinstance(value, Tensor) for value in group.values())
