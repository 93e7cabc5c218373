"""Tensor-parallel plans for engines with plain parameters only.

Each rank's part becomes an ordinary parameter of the module. Before every forward a DTensor of it, cast to the compute
dtype, shadows it, and autograd returns plain gradients, summed over the axis where they are partial. So gradients,
optimizer and DDP see ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from harness.fsdp import TpShard

Slots = list[tuple[nn.Module, str, nn.Parameter]]


@dataclass(frozen=True)
class Planned:
    """This rank's part of each weight, by name; all of it without a plan.

    group: tensor-parallel ranks; None without. specs: DTensor spec of each cut weight.
    """

    tp_shards: Mapping[str, TpShard]
    group: dist.ProcessGroup | None = None
    specs: Mapping[str, DTensorSpec] = field(default_factory=dict)

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Unsharded tensor of a weight's shape from every rank's part. Collective over the axis."""
        return self.tp_shards[name].join(value.detach(), self.group)

    def described(self, name: str, value: Tensor) -> Tensor:
        spec = self.specs.get(name)
        if spec is None or tuple(value.shape) != self.tp_shards[name].here:
            return value
        return _described(value, spec)

    def is_counted(self, name: str) -> bool:
        """True if this rank counts a weight's elements in sums over ranks."""
        return self.tp_shards[name].is_counted_here

    def total(self, counters: Tensor) -> Tensor:
        """Sum over the ranks of the axis, in place. Collective over the axis."""
        if self.group is not None:
            dist.all_reduce(counters, group=self.group)
        return counters


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
