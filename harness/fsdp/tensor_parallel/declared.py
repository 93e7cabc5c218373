"""Modules that cut themselves and declare over which ranks, as TransformerEngine's do.

[Note: Declared meshes] A module is built with the sizes of this rank's TP shard and has a method

    set_device_mesh(tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None

which makes DTensors of its parameters over `tp_mesh` (the interface of TransformerEngine's pull request 2713). Both
meshes have one axis; `weight_mesh` is all axes that cut weights, flattened, the tensor-parallel one fastest. The engine
calls the method before it looks at any parameter, on the meta device too; `reset_parameters` of such a module resets TP
shards. Optimizers that were built before get the new parameters. A module whose parameters are DTensors is left alone,
and so is a method of this name with other arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.private_torch import parameters_of

METHOD = "set_device_mesh"
ARGUMENTS = ("tp_mesh", "weight_mesh")
SUCCESSOR = "_fsdp_successor"
Meshes = tuple[DeviceMesh | None, DeviceMesh | None]


def declares(part: nn.Module) -> bool:
    method = getattr(part, METHOD, None)
    return callable(method) and set(ARGUMENTS) <= set(inspect.signature(method).parameters)


def declare(module: nn.Module, meshes_of: Callable[[nn.Module], Meshes]) -> None:
    """Raises ValueError: a module made another number of parameters, or of other names."""
    for path, part in module.named_modules():
        own = {name: param for name, param in parameters_of(part).items() if param is not None}
        if not declares(part) or any(isinstance(param, DTensor) for param in own.values()):
            continue
        tp_mesh, weight_mesh = meshes_of(part)
        part.set_device_mesh(tp_mesh=tp_mesh, weight_mesh=weight_mesh)
        made = {name: param for name, param in parameters_of(part).items() if param is not None}
        if list(made) != list(own):
            raise ValueError(
                f"{path or 'the module'}.{METHOD}() left parameters {list(made)} where there were {list(own)}: it may"
                " make DTensors of them, and nothing else"
            )
        _replace(module, {id(param): made[name] for name, param in own.items() if made[name] is not param})
        for name, param in own.items():
            _succeed(param, made[name])


def _replace(module: nn.Module, by: Mapping[int, nn.Parameter]) -> None:
    for part in module.modules():
        for name, param in parameters_of(part).items():
            if id(param) in by:
                parameters_of(part)[name] = by[id(param)]


def _succeed(held: nn.Parameter, made: nn.Parameter) -> None:
    if made is not held:
        made.__dict__.update({key: value for key, value in held.__dict__.items() if key not in made.__dict__})
        setattr(held, SUCCESSOR, made)


def successor_of(param: Tensor) -> Tensor:
    return cast(Tensor, getattr(param, SUCCESSOR, param))
