"""Unsharded model in plain torch, for self-checks of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from harness.config.schema import Config
from harness.engines.base.eight_bits import uncast
from harness.engines.base.planned import shadow_weights
from harness.engines.protocol import Workload
from harness.engines.torch_dtypes import TORCH_DTYPES


@contextmanager
def plain_model(workload: Workload, config: Config, device: torch.device) -> Iterator[nn.Module]:
    """Unsharded model with uninitialised parameters in the main dtype, cast to the compute dtype before each forward.

    Its memory is freed with the last reference.
    """
    compute, main = TORCH_DTYPES[config.dtype.compute], TORCH_DTYPES[config.dtype.main_params]
    model = workload.build(device, main)
    workload.quantize(model, device)
    if compute is not main:
        shadow_weights(model, compute, uncast=uncast(model))
    try:
        yield model
    finally:
        model._forward_pre_hooks.clear()  # the one that casts holds the model: a cycle would wait for its collector
