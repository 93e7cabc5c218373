"""Modules of engines with plain parameters only: casts, FP8 layers, and evaluation.

Before every forward a copy of each parameter in the compute dtype shadows it, and autograd returns gradients of the
parameter. Weights of FP8 layers are ordinary ones too, quantized at each use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from harness.config.schema import Config
from harness.engines.protocol import TORCH_DTYPES, Workload
from harness.fp8.linear import Fp8Linear


def shadow_weights(model: nn.Module, dtype: torch.dtype, uncast: Collection[int] = ()) -> None:
    """Before every forward, shadow each parameter by a copy in `dtype`.

    Parameters whose ids are in `uncast` keep their dtype. Python finds an instance attribute before a registered
    parameter: `module.weight` is the copy, `named_parameters()` still yields the parameter. Copies stay until the next
    forward, for recomputation in the backward.
    """
    slots = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]

    def shadow(_module: nn.Module, _args: object) -> None:
        for module, name, param in slots:
            module.__dict__[name] = param if id(param) in uncast else param.to(dtype)

    model.register_forward_pre_hook(shadow)


def uncast(model: nn.Module) -> set[int]:
    """Ids of parameters quantized from the main weights' dtype: a cast to the compute dtype would round twice."""
    return {id(layer.weight) for layer in model.modules() if isinstance(layer, Fp8Linear) and layer.is_held}


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which modules evaluate; modes and random numbers are then as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def plain_model(workload: Workload, config: Config, device: torch.device) -> Iterator[nn.Module]:
    """Unsharded model with uninitialised parameters in the main dtype, cast to the compute dtype before each forward.

    Its memory is freed with the last reference.
    """
    compute, main = TORCH_DTYPES[config.dtype.compute], TORCH_DTYPES[config.dtype.main_params]
    model = workload.build(device, main)
    workload.quantize(model, device)
    if compute is not main:
        shadow_weights(model, compute, uncast(model))
    try:
        yield model
    finally:
        model._forward_pre_hooks.clear()  # the one that casts holds the model: a cycle would wait for its collector
