"""Other data-parallel engines around a sharded model, or a part of it, leave its parameters alone or are refused.

Two engines would both reduce a gradient, or gather a weight. DistributedDataParallel is refused when it asks a sharded
model what to ignore; torch's other engines do not take DTensors, and what they put in is found in the next forward.
"""

from __future__ import annotations

from typing import NoReturn

from torch import nn

IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute that DistributedDataParallel reads of the module it is given."""
_PART = "_part_of_sharded"
"""Key of the `__dict__` of every part of a sharded model."""


def register(module: nn.Module) -> None:
    for part in module.modules():
        vars(part)[_PART] = True


def is_registered(part: nn.Module) -> bool:
    return _PART in vars(part)


def refuse_ddp() -> NoReturn:
    raise ValueError(
        "DistributedDataParallel around a model, or a part of one, that is sharded already: both would reduce its"
        " gradients, and training would be wrong. Leave DistributedDataParallel out and use the sharded model as it is;"
        " where it is a part of a larger model, shard the outermost module instead, and name what is gathered together"
        " in unit_modules (fully_shard_model: fsdp_unit_modules)"
    )
