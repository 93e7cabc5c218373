"""Parameters under tensor parallelism: TP shards, and DTensors' values, gradients and edits on this rank.

[Note: Under tensor parallelism] A plan comes first: torch's `parallelize_module`, or modules that cut themselves. The
engine shards the rows of each TP shard over the data-parallel ranks that have it. Values that come unsharded are cut to
the TP shard, and joined where they are handed out (`harness.fsdp.module`). A copy on every rank of the axis counts once
in a norm, begins alike and must stay alike (`harness.fsdp.guards`). A gradient may be a term of a sum over the
axis (`gradient_here`). Of a `DTensor` parameter the engine moves the plain tensor inside into its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.private_torch import local_tensor, put_local_tensor, spec_of, version_of

Shape = tuple[int, ...]


class UnknownPlan(ValueError):
    """No tensor-parallel axis explains how a parameter is cut."""


@dataclass(frozen=True)
class TpShard:
    """shape: of the unsharded parameter. dim: the one that is split as by `torch.chunk`; None: every rank has a copy.
    rank, size: on the tensor-parallel axis.
    """

    shape: Shape
    dim: int | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, name: str, param: Tensor, group: dist.ProcessGroup | None) -> TpShard:
        """From a DTensor's placement, or Megatron's marks (`tensor_model_parallel`, `partition_dim`); else a copy.
        Raises UnknownPlan: a DTensor over other ranks, or neither replicated nor split along one dimension as by
        torch.chunk."""
        shape = tuple(param.shape)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if not isinstance(param, DTensor):
            if not getattr(param, "tensor_model_parallel", False):
                return cls(shape, None, rank, size)
            dim = getattr(param, "partition_dim", 0) % param.dim()  # of equal parts
            return cls((*shape[:dim], shape[dim] * size, *shape[dim + 1 :]), dim, rank, size)
        _check_axis(name, param, group)
        placement = param.placements[0]
        if isinstance(placement, Replicate):
            return cls(shape, None, rank, size)
        if type(placement) is not Shard:
            raise UnknownPlan(
                f"parameter {name} is placed as {placement}: tensor parallelism here is Shard(dim) or Replicate() on"
                " one axis"
            )
        return cls(shape, placement.dim % max(1, len(shape)), rank, size)

    @property
    def is_whole(self) -> bool:
        return self.dim is None or self.size == 1

    @property
    def is_copied(self) -> bool:
        return self.dim is None and self.size > 1

    @property
    def is_counted_here(self) -> bool:
        return self.rank == 0 or not self.is_copied

    def _span(self, length: int) -> tuple[int, int]:
        """Begin and length of this rank's cut of the dimension."""
        width = -(-length // self.size)
        begin = min(self.rank * width, length)
        return begin, min(width, length - begin)

    @property
    def here(self) -> Shape:
        return tuple(self._span(n)[1] if dim == self.dim else n for dim, n in enumerate(self.shape))

    def cut(self, value: Tensor) -> Tensor:
        """This rank's TP shard; a value of its shape is returned. Raises ValueError for any other shape."""
        if tuple(value.shape) == self.here:
            return value
        if tuple(value.shape) != self.shape:
            raise ValueError(f"a value of shape {tuple(value.shape)} is given where {self.shape} is due")
        dim = cast(int, self.dim)
        return value.narrow(dim, *self._span(self.shape[dim]))

    def join(self, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The unsharded parameter, any dtype. *Collective* over the axis if it is split.

        value: this rank's TP shard; where it has no elements, in any shape.
        """
        if self.dim is None or self.size == 1 or group is None:
            return value
        mesh = DeviceMesh.from_group(group, value.device.type)
        whole = torch.empty(self.shape, device="meta")
        made = DTensor.from_local(
            value.reshape(self.here), mesh, [Shard(self.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return made.full_tensor().contiguous()


def _check_axis(name: str, param: DTensor, group: dist.ProcessGroup | None) -> None:
    mesh, given = param.device_mesh, f"parameter {name} is a DTensor ({param.placements})"
    if mesh.ndim != 1:
        raise UnknownPlan(
            f"{given} on {mesh.ndim} mesh dimensions ({mesh.mesh_dim_names}): another engine has sharded it; cut it"
            " over one dimension by tensor parallelism, or not at all, before it is sharded here"
        )
    ranks, own = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(group)
    if ranks != own:
        raise UnknownPlan(f"{given} over ranks {ranks}, but the tensor-parallel axis of this rank has ranks {own}")


def axis_of(params: Iterable[Tensor]) -> dist.ProcessGroup | None:
    meshes = (param.device_mesh for param in params if isinstance(param, DTensor))
    return next((mesh.get_group() for mesh in meshes if mesh.ndim == 1), None)


put_data: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined] # a descriptor of C


def values_here(param: Tensor) -> Tensor:
    return local_tensor(param) if isinstance(param, DTensor) else param.detach()


def point_at(param: Tensor, values: Tensor) -> None:
    """Let a parameter, or the tensor inside a DTensor, have these values."""
    if not isinstance(param, DTensor):
        put_data(param, values)
        return
    held: Any = param
    if values.dtype == held.dtype:  # torch.compile asks that the object begins where the tensor inside it does
        put_data(held, DTensor(values, spec_of(held), requires_grad=False))
    put_local_tensor(held, values.data)  # whose edits are counted apart from those of the bucket


def edits_of(param: Tensor) -> int:
    """Number of edits in place that torch has counted, those of the tensor inside a DTensor too."""
    return version_of(param) + (version_of(local_tensor(param)) if isinstance(param, DTensor) else 0)


def gradient_here(param: nn.Parameter, gradient: Tensor) -> Tensor:
    """This rank's TP shard of a gradient, plain. *Collective* over the axis where it is a term of a sum."""
    if not isinstance(gradient, DTensor):
        return gradient
    placements = cast(DTensor, param).placements
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    held: Any = local_tensor(gradient)  # torch waits for a collective in the first use of what it gives
    return cast(Tensor, held.wait() if hasattr(held, "wait") else held)


def real(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    if isinstance(param, DTensor):
        mesh, stride = param.device_mesh, param.stride()
        values = DTensor.from_local(values, mesh, param.placements, run_check=False, shape=param.shape, stride=stride)
    return nn.Parameter(values, requires_grad=param.requires_grad)
