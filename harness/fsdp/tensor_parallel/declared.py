"""Modules that cut themselves and declare over which ranks, as TransformerEngine's do.

[Note: Declared meshes] A module is built with the sizes of this rank's portion and has a method

    set_device_mesh(tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None

which makes DTensors of its parameters: their placements over `tp_mesh` say what of the whole parameter each is (the
interface of TransformerEngine's modules in pull request 2713). `tp_mesh` has one axis. `weight_mesh` has one, too: all
axes that cut weights, flattened, the tensor-parallel one fastest; what only replicates them is left out. It is what a
module that quantizes its weights takes an amax over. The engine calls the method before it looks at any parameter, so
also before `reset_parameters`, on the meta device as elsewhere. Such a module resets its own portions, not whole
parameters as others do (see [Note: Meta device]): how they follow from each other is for it to say.

Optimizers that were built before hold the parameters that the method has replaced; the engine takes them for the new
ones, and so do modules that were tied to them. A module whose parameters are DTensors was told before and is
left alone, and so is a method of this name with other arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.fsdp.members import group_of_members

METHOD = "set_device_mesh"
ARGUMENTS = ("tp_mesh", "weight_mesh")
SUCCESSOR = "_fsdp_successor"
"""Attribute of a parameter that was replaced: what it was replaced by."""
Meshes = tuple[DeviceMesh | None, DeviceMesh | None]
"""What a module is told: the tensor-parallel axis, and the axes that cut its weights; None where there is none."""

_CROSSED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups that were made of two axes, by the first of them. Kept, since torch names groups by their ranks."""


def declares(part: nn.Module) -> bool:
    """Whether a module takes the meshes that cut it."""
    method = getattr(part, METHOD, None)
    return callable(method) and set(ARGUMENTS) <= set(inspect.signature(method).parameters)


def declare(module: nn.Module, meshes_of: Callable[[nn.Module], Meshes]) -> None:
    """Tell every module that takes meshes which ones cut it.

    Args:
        meshes_of: such a module's.

    Raises:
        ValueError: a module made another number of parameters, or of other names.
    """
    for path, part in module.named_modules():
        own = {name: param for name, param in part._parameters.items() if param is not None}
        if not declares(part) or any(isinstance(param, DTensor) for param in own.values()):
            continue
        tp_mesh, weight_mesh = meshes_of(part)
        part.set_device_mesh(tp_mesh=tp_mesh, weight_mesh=weight_mesh)
        made = {name: param for name, param in part._parameters.items() if param is not None}
        if list(made) != list(own):
            raise ValueError(
                f"{path or 'the module'}.{METHOD}() left parameters {list(made)} where there were {list(own)}: it may"
                " make DTensors of them, and nothing else"
            )
        _replace(module, {id(param): made[name] for name, param in own.items() if made[name] is not param})
        for name, param in own.items():
            _succeed(param, made[name])


def _replace(module: nn.Module, by: Mapping[int, nn.Parameter]) -> None:
    """Let every module that has a replaced parameter have the new one."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if id(param) in by:
                part._parameters[name] = by[id(param)]


def _succeed(held: nn.Parameter, made: nn.Parameter) -> None:
    """Give a new parameter what the program has noted on the one in whose place it is."""
    if made is not held:
        made.__dict__.update({key: value for key, value in held.__dict__.items() if key not in made.__dict__})
        setattr(held, SUCCESSOR, made)


def successor_of(param: Tensor) -> Tensor:
    """The parameter that a module has in place of one that was replaced when it was told its meshes; else, itself."""
    found: Tensor = getattr(param, SUCCESSOR, param)
    return found


def mesh_of(data: dist.ProcessGroup | None, tensor: dist.ProcessGroup | None, kind: str) -> DeviceMesh | None:
    """One axis of all ranks of two; None where neither is there. *Collective* among them where both are.

    Args:
        data, tensor: groups of this rank on axes of one grid; the second one runs fastest.
        kind: of device.
    """
    if data is None or tensor is None:
        one = tensor if data is None else data
        return None if one is None else DeviceMesh.from_group(one, kind)
    row = torch.tensor(dist.get_process_group_ranks(tensor), device=kind)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(data))]
    dist.all_gather(rows, row, group=data)
    ranks = tuple(torch.cat(rows).tolist())
    found = _CROSSED.setdefault(data, {})
    if ranks not in found:
        found[ranks] = group_of_members(ranks, "weights", like=data)
    return DeviceMesh.from_group(found[ranks], kind)
