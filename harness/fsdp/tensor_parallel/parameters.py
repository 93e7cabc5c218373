"""Parameters that a plan of tensor parallelism made DTensors of: their values, gradients and edits on this rank.

A `DTensor` parameter is an object of its own kind around a plain tensor, this rank's portion. The engine moves the
plain tensor into its bucket and leaves the object, which modules and optimizers hold, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.fsdp.tensor_parallel.portion import Portion

EDITS = "_fsdp_edits"
"""Attribute of a DTensor parameter: edits of local tensors that it had before."""


class UnknownPlan(ValueError):
    """A parameter is split in a way that the engine does not support as tensor parallelism over the given axis."""


def portion_of(name: str, param: Tensor, group: dist.ProcessGroup | None) -> Portion:
    """Which portion of a parameter this rank holds. A DTensor's placement tells it; Megatron's marks
    (`tensor_model_parallel`, `partition_dim`) tell it for a plain parameter that has them. Any other is whole.

    Args:
        group: ranks of the tensor-parallel axis; None without one.

    Raises:
        UnknownPlan: a DTensor over other ranks, or neither replicated nor split along one dimension as by torch.chunk.
    """
    shape = tuple(param.shape)
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if not isinstance(param, DTensor):
        dim = partition_dim(param)
        if dim is not None:
            shape = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
        return Portion(shape, dim, rank, size)
    _check(name, param, group)
    placement = param.placements[0]
    if isinstance(placement, Replicate):
        return Portion(shape, None, rank, size)
    if type(placement) is not Shard:
        raise UnknownPlan(
            f"parameter {name} is placed as {placement}: tensor parallelism here is Shard(dim) or Replicate() on one"
            " axis"
        )
    return Portion(shape, placement.dim % max(1, len(shape)), rank, size)


def partition_dim(param: Tensor) -> int | None:
    """The dimension along which Megatron's marks say that a plain parameter is cut in equal parts; None: no mark."""
    if not getattr(param, "tensor_model_parallel", False):
        return None
    dim: int = getattr(param, "partition_dim", 0)
    return dim % param.dim()


def axis_of(params: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """The ranks over which a plan of tensor parallelism cut parameters; None where none is a DTensor of one axis."""
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    mesh: DeviceMesh | None = next((each for each in meshes if each.ndim == 1), None)
    return None if mesh is None else mesh.get_group()


def _check(name: str, param: DTensor, group: dist.ProcessGroup | None) -> None:
    mesh, given = param.device_mesh, f"parameter {name} is a DTensor ({param.placements})"
    if mesh.ndim != 1:
        raise UnknownPlan(
            f"{given} on {mesh.ndim} mesh dimensions ({mesh.mesh_dim_names}): another engine has sharded it; cut it"
            " over one dimension by tensor parallelism, or not at all, before it is sharded here"
        )
    if group is None:
        raise UnknownPlan(
            f"{given}, and no tensor-parallel axis was given: name the mesh dimension it was cut over, tp_dim='tp'"
        )
    ranks, own = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(group)
    if ranks != own:
        raise UnknownPlan(f"{given} over ranks {ranks}, but the tensor-parallel axis of this rank has ranks {own}")


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


def cut_portion(portion: Portion, value: Tensor) -> Tensor:
    """This rank's portion of a whole parameter. A tensor that already has the portion's shape is returned as it is.

    Raises:
        ValueError: it has neither shape.
    """
    if tuple(value.shape) == portion.here:
        return value
    if tuple(value.shape) != portion.shape:
        raise ValueError(f"a value of shape {tuple(value.shape)} is given where {portion.shape} is due")
    assert portion.dim is not None
    begin, end = portion.span()
    return value.narrow(portion.dim, begin, end - begin)


def join_portions(portion: Portion, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Assemble the whole parameter from every rank's portion; any dtype. *Collective* over the axis if it is split.

    Args:
        value: this rank's portion; where it has no elements, in any shape. group: ranks of the axis.
    """
    if portion.is_whole or group is None:
        return value
    dim = portion.dim
    assert dim is not None
    spans = [portion.span(rank) for rank in range(portion.size)]
    most = max(end - begin for begin, end in spans)
    here = portion.here
    padded = value.new_zeros((*here[:dim], most, *here[dim + 1 :]))
    padded.narrow(dim, 0, here[dim]).copy_(value.reshape(here))
    found = [torch.empty_like(padded) for _ in spans]
    dist.all_gather(found, padded, group=group)
    return torch.cat([part.narrow(dim, 0, end - begin) for part, (begin, end) in zip(found, spans, strict=True)], dim)
