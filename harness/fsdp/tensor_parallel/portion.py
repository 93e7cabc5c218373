"""What one rank of a tensor-parallel axis has of a parameter: all of it, or its cut of one dimension.

[Note: Under tensor parallelism] A plan (`torch.distributed.tensor.parallel.parallelize_module`, or modules that cut
themselves) comes first, and the engine shards what it left: rows of this rank's *portion*, over the data-parallel ranks
that have the same portion. So a bucket, its layout and its collectives know nothing of the plan. Four things do. Values
that come whole are cut to the portion, and made whole of portions where they are handed out (`harness.fsdp.state`).
What every rank of the axis has whole counts once in a norm, begins alike and must stay alike
(`harness.fsdp.guards.replicas`). What one rank finds, the ranks of the axis must hear of too
(`harness.fsdp.comm.crossed`). And autograd may bring such a parameter the term of a sum that this rank made, which is
summed over the axis before it is anybody's gradient (`harness.fsdp.tensor_parallel.parameters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Shape = tuple[int, ...]


class UnknownPlan(ValueError):
    """A parameter is split in a way that the engine does not support as tensor parallelism over the given axis."""


@dataclass(frozen=True)
class Portion:
    """The portion of a parameter that one rank of the tensor-parallel axis holds.

    shape: shape of the whole parameter. dim: the dimension that is split, as by `torch.chunk` (torch's `Shard(dim)`);
    None if every rank holds the whole parameter. rank, size: this rank's place on the axis, and its number of ranks.
    """

    shape: Shape
    dim: int | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, name: str, param: Tensor, group: dist.ProcessGroup | None) -> Portion:
        """Which portion of a parameter this rank holds. A DTensor's placement tells it; Megatron's marks
        (`tensor_model_parallel`, `partition_dim`) tell it for a plain parameter that has them. Any other is whole.

        Args:
            group: ranks of the tensor-parallel axis; None without one.

        Raises:
            UnknownPlan: a DTensor over other ranks, or neither replicated nor split along one dimension as by
                torch.chunk.
        """
        shape = tuple(param.shape)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if not isinstance(param, DTensor):
            dim = partition_dim(param)
            if dim is not None:
                shape = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
            return cls(shape, dim, rank, size)
        _check(name, param, group)
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
        """Whether this rank has the whole parameter."""
        return self.dim is None or self.size == 1

    @property
    def is_copied(self) -> bool:
        """Whether several ranks of the axis have the same elements."""
        return self.dim is None and self.size > 1

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank counts its elements where each counts once: of copies, those of the first rank."""
        return self.rank == 0 or not self.is_copied

    def span(self, rank: int | None = None) -> tuple[int, int]:
        """Begin and end of a rank's cut of the dimension; of this rank's own by default.

        Raises:
            ValueError: nothing is cut.
        """
        if self.dim is None:
            raise ValueError(f"a parameter of shape {self.shape} that is not cut has no span")
        length = self.shape[self.dim]
        width = -(-length // self.size)
        begin = min((self.rank if rank is None else rank) * width, length)
        return begin, min(begin + width, length)

    @property
    def here(self) -> Shape:
        """Shape of this rank's portion."""
        if self.dim is None:
            return self.shape
        begin, end = self.span()
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of this rank's portion."""
        return prod(self.here)

    @property
    def offsets(self) -> Shape:
        """Where this rank's portion begins in the whole."""
        begin = 0 if self.dim is None else self.span()[0]
        return tuple(begin if dim == self.dim else 0 for dim in range(len(self.shape)))

    def cut(self, value: Tensor) -> Tensor:
        """This rank's portion of a whole parameter. A tensor that already has the portion's shape is returned as it is.

        Raises:
            ValueError: it has neither shape.
        """
        if tuple(value.shape) == self.here:
            return value
        if tuple(value.shape) != self.shape:
            raise ValueError(f"a value of shape {tuple(value.shape)} is given where {self.shape} is due")
        assert self.dim is not None
        begin, end = self.span()
        return value.narrow(self.dim, begin, end - begin)

    def join(self, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Assemble the whole parameter from every rank's portion; any dtype. *Collective* over the axis if it is split.

        Args:
            value: this rank's portion; where it has no elements, in any shape. group: ranks of the axis.
        """
        if self.is_whole or group is None:
            return value
        dim = self.dim
        assert dim is not None
        spans = [self.span(rank) for rank in range(self.size)]
        most = max(end - begin for begin, end in spans)
        here = self.here
        padded = value.new_zeros((*here[:dim], most, *here[dim + 1 :]))
        padded.narrow(dim, 0, here[dim]).copy_(value.reshape(here))
        found = [torch.empty_like(padded) for _ in spans]
        dist.all_gather(found, padded, group=group)
        parts = (part.narrow(dim, 0, end - begin) for part, (begin, end) in zip(found, spans, strict=True))
        return torch.cat(list(parts), dim)


def partition_dim(param: Tensor) -> int | None:
    """The dimension along which Megatron's marks say that a plain parameter is cut in equal parts; None: no mark."""
    if not getattr(param, "tensor_model_parallel", False):
        return None
    dim: int = getattr(param, "partition_dim", 0)
    return dim % param.dim()


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
