"""Layers that multiply 8-bit numbers under engines that know nothing of them: the weights are ordinary ones, which each
layer quantizes at each use, and delayed scaling is looked after here. Our own engine does both itself."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from harness.engines.protocol import Ranks
from harness.fsdp import Fp8Linear

FP8 = "fp8/"


def end_step(model: nn.Module, ranks: Ranks) -> None:
    """Close a step of delayed scaling. *Collective* where there are layers under it and several ranks."""
    Fp8Linear.update_scales(model, _take_largest if ranks.world_size > 1 else None)


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    """State of delayed scaling, the same on all ranks between steps; the buffers themselves."""
    return {FP8 + name: buffer for name, buffer in Fp8Linear.delayed_state(model).items()}


def uncast(model: nn.Module) -> set[int]:
    """Ids of parameters that layers quantize from the main weights' dtype, as our own engine does: a cast to the
    compute dtype in between would round twice."""
    return {id(layer.weight) for layer in model.modules() if isinstance(layer, Fp8Linear) and layer.is_held}


def _take_largest(amaxes: Tensor) -> None:
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
