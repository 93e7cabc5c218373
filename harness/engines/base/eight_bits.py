"""FP8 layers for engines without support: weights are ordinary ones, quantized at each use.

Delayed scaling is updated here. Our own engine does both itself.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from harness.engines.protocol import Ranks
from harness.fsdp import Fp8Linear

FP8 = "fp8/"


def end_step(model: nn.Module, ranks: Ranks) -> None:
    """Close a step of delayed scaling. Collective over all ranks, if any layer uses it."""
    Fp8Linear.update_scales(model, _take_largest if ranks.world_size > 1 else None)


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    return {FP8 + name: buffer for name, buffer in Fp8Linear.delayed_state(model).items()}


def uncast(model: nn.Module) -> set[int]:
    """Ids of parameters quantized from the main weights' dtype: a cast to the compute dtype would round twice."""
    return {id(layer.weight) for layer in model.modules() if isinstance(layer, Fp8Linear) and layer.is_held}


def _take_largest(amaxes: Tensor) -> None:
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
