"""Modules of engines with plain parameters only: tensor-parallel plans, casts, FP8 layers, and evaluation.

Each tensor-parallel rank's part becomes an ordinary parameter of the module. Before every forward a DTensor of it, cast
to the compute dtype, shadows it, and autograd returns plain gradients, summed over the axis where they are partial. So
gradients, optimizer and DDP see ordinary tensors. Weights of FP8 layers are ordinary ones too, quantized at each use;
delayed scaling is updated here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from harness.config.schema import Config
from harness.engines.protocol import TORCH_DTYPES, Ranks, Workload
from harness.fsdp import Fp8Linear, TpShard

Slots = list[tuple[nn.Module, str, nn.Parameter]]


@dataclass(frozen=True)
class Planned:
    """This rank's part of each weight, by name; all of it without a plan.

    group: tensor-parallel ranks; None without. specs: DTensor spec of each cut weight.
    """

    tp_shards: Mapping[str, TpShard]
    group: dist.ProcessGroup | None = None
    specs: Mapping[str, DTensorSpec] = field(default_factory=dict)

    def described(self, name: str, value: Tensor) -> Tensor:
        spec = self.specs.get(name)
        if spec is None or tuple(value.shape) != self.tp_shards[name].here:
            return value
        return _described(value, spec)


def take_plan(model: nn.Module, axis: DeviceMesh | None) -> Planned:
    """Make ordinary parameters of a plan's DTensors; no-op without an axis."""
    if axis is None:
        return Planned({name: TpShard(tuple(param.shape)) for name, param in model.named_parameters()})
    group = axis.get_group()
    tp_shards = {name: TpShard.of(name, param, group) for name, param in model.named_parameters()}
    specs = {name: param._spec for name, param in model.named_parameters() if isinstance(param, DTensor)}
    made: dict[int, nn.Parameter] = {}
    for module, name, param in slots_of(model):
        if isinstance(param, DTensor):
            plain = nn.Parameter(param.to_local().detach(), requires_grad=param.requires_grad)
            module._parameters[name] = made.setdefault(id(param), plain)
    return Planned(tp_shards, group, specs)


def slots_of(model: nn.Module) -> Slots:
    return [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]


def shadow_weights(
    model: nn.Module,
    dtype: torch.dtype,
    specs: Mapping[str, DTensorSpec] | None = None,
    uncast: Collection[int] = (),
) -> None:
    """Before every forward, shadow each parameter by a copy in `dtype`, as a DTensor where `specs` names it.

    Parameters whose ids are in `uncast` keep their dtype. Python finds an instance attribute before a registered
    parameter: `module.weight` is the copy, `named_parameters()` still yields the parameter. Copies stay until the next
    forward, for recomputation in the backward.
    """
    of = {id(param): (specs or {}).get(name) for name, param in model.named_parameters()}
    slots = slots_of(model)

    def shadow(_module: nn.Module, _args: object) -> None:
        for module, name, param in slots:
            cast, spec = param if id(param) in uncast else param.to(dtype), of[id(param)]
            module.__dict__[name] = cast if spec is None else _described(cast, spec)

    model.register_forward_pre_hook(shadow)


def _described(value: Tensor, spec: DTensorSpec) -> Tensor:
    made: Tensor = DTensor.from_local(
        value, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return made


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


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which modules evaluate; modes, random numbers and scales of FP8 are then as before."""
    modes = [(module, module.training) for module in model.modules()]
    scales = [(buffer, buffer.clone()) for buffer in Fp8Linear.delayed_state(model).values()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in scales:
                buffer.copy_(before)


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
