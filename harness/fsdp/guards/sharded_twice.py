"""Other data-parallel engines around a sharded model, or a part of it, leave its parameters alone or are refused.

Two engines would both reduce a gradient, or gather a weight. Torch's composable engines, and FSDP1, skip modules that
one of them has registered, so every part of a sharded model is registered. DistributedDataParallel is refused when it
asks a sharded model what to ignore, and else in the first forward with gradients.
"""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from harness.private_torch import active_ddp, mark_composed

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute that DistributedDataParallel reads of the module it is given."""
_PART = "_part_of_sharded"
"""Key of the `__dict__` of every part of a sharded model."""
_APIS = ("fully_shard", "replicate")


def register(module: nn.Module) -> None:
    for part in module.modules():
        vars(part)[_PART] = True
        mark_composed(part, _APIS)


def is_registered(part: nn.Module) -> bool:
    return _PART in vars(part)


def refuse_ddp_around(module: nn.Module) -> None:
    active = active_ddp()
    if active is not None and any(part is module for part in active.module.modules()):
        refuse_ddp()


def refuse_ddp() -> NoReturn:
    raise ValueError(
        "DistributedDataParallel around a model, or a part of one, that is sharded already: both would reduce its"
        " gradients, and training would be wrong. Leave DistributedDataParallel out and use the sharded model as it is;"
        " where it is a part of a larger model, shard the outermost module instead, and name what is gathered together"
        " in unit_modules (fully_shard_model: fsdp_unit_modules)"
    )
