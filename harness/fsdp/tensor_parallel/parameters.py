"""Parameters that a plan of tensor parallelism made DTensors of: their values, gradients and edits on this rank.

A `DTensor` parameter is an object of its own kind around a plain tensor, this rank's portion. The engine moves the
plain tensor into its bucket and leaves the object, which modules and optimizers hold, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

EDITS = "_fsdp_edits"
"""Attribute of a DTensor parameter: edits of local tensors that it had before."""


def axis_of(params: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """The ranks over which a plan of tensor parallelism cut parameters; None where none is a DTensor of one axis."""
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    mesh: DeviceMesh | None = next((each for each in meshes if each.ndim == 1), None)
    return None if mesh is None else mesh.get_group()


def values_here(param: Tensor) -> Tensor:
    """The plain tensor with this rank's values of a parameter, whatever class it has."""
    return DTensors.values(param) if isinstance(param, DTensor) else param.detach()


put_data: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined] # a descriptor of C
"""Let a tensor be the values of another one, whose object stays."""


class Plain:
    """How the engine handles parameters that hold their values themselves, whatever class they have now."""

    point: Callable[[Tensor, Tensor], None] = staticmethod(put_data)
    """Let a tensor be this rank's values of a parameter; the object stays."""

    @staticmethod
    def values(param: Tensor) -> Tensor:
        """Where this rank's values lie."""
        return param

    @staticmethod
    def edits(param: Tensor) -> int:
        """How often a parameter was edited in place, as torch counts it."""
        return param._version


class DTensors:
    """How the engine handles parameters whose values lie in a tensor inside them, whose edits count, too."""

    @staticmethod
    def point(param: Tensor, values: Tensor) -> None:
        """As `Plain.point`."""
        held: Any = param
        setattr(held, EDITS, getattr(held, EDITS, 0) + held._local_tensor._version)
        if values.dtype == held.dtype:  # torch.compile asks that the object begins where the tensor inside it does
            put_data(held, DTensor(values, held._spec, requires_grad=False))
        held._local_tensor = values.data  # whose edits are counted apart from those of the bucket

    @staticmethod
    def values(param: Tensor) -> Tensor:
        """As `Plain.values`."""
        held: Any = param
        inside: Tensor = held._local_tensor
        return inside

    @staticmethod
    def edits(param: Tensor) -> int:
        """As `Plain.edits`."""
        count: int = param._version + getattr(param, EDITS, 0) + DTensors.values(param)._version
        return count


Handling = type[Plain] | type[DTensors]


def handling_of(param: Tensor) -> Handling:
    """How the engine handles a parameter."""
    return DTensors if isinstance(param, DTensor) else Plain


def gradient_here(param: nn.Parameter, gradient: Tensor) -> Tensor:
    """This rank's portion of a gradient that autograd brought, plain. *Collective* over the tensor-parallel axis where
    it is a term of a sum, as that of a norm's weight under sequence parallelism is.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(param, DTensor)
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    held: Any = gradient._local_tensor
    plain: Tensor = held.wait() if isinstance(held, AsyncCollectiveTensor) else held
    return plain


def real(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter like one on the meta device, around values of its portion."""
    if isinstance(param, DTensor):
        made: Tensor = DTensor.from_local(
            values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    else:
        made = values
    return nn.Parameter(made, requires_grad=param.requires_grad)
