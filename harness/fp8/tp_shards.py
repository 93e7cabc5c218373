"""FP8 layers whose weight a plan of tensor parallelism has cut: the operands and the product of each rank.

[Note: FP8 and tensor parallelism] A plan makes the weight [out, in] a DTensor, and each rank multiplies its TP shard of
it: of rows (torch's `ColwiseParallel`: x unsharded, y cut along its last dimension) or of columns (`RowwiseParallel`: x
cut along its last dimension, y a term of a sum). What is reduced where:

- A weight's amax is that of the unsharded weight, so the largest over the tensor-parallel axis too: a weight is state,
  and its bits must not depend on how it lies.
- Amaxes of activations and gradients are of what this rank multiplies, as in TransformerEngine: nothing else is
  multiplied with them, and each product would wait for a collective.

Tiles of the other recipes lie within a tp_shard: both its sizes must be multiples of the tile's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness.private_torch import local_tensor

ROWS, COLUMNS = 0, 1
"""Dimensions of a weight [out, in]."""


def tp_shard_here(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, any other itself; plain and outside autograd."""
    local: Tensor = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach()


def cut_along(weight: Tensor) -> int | None:
    """The dimension along which a plan has cut a weight; None where this rank has all of it."""
    placement = weight.placements[0] if isinstance(weight, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def _by_cut(weight: Tensor, rows: Placement, columns: Placement) -> list[Placement]:
    """The placement of an activation whose weight is cut by rows, or by columns; replicated where it is not cut."""
    return [{None: Replicate(), ROWS: rows, COLUMNS: columns}[cut_along(weight)]]


def input_here(x: Tensor, weight: DTensor) -> Tensor:
    """This rank's operand of x [..., in], a DTensor, or the same on every rank of the axis. *Collective* where x lies
    otherwise than the weight asks for."""
    last = Shard(x.dim() - 1)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    placed = x.redistribute(placements=_by_cut(weight, Replicate(), last))
    found: Tensor = placed.to_local(grad_placements=_by_cut(weight, Partial(), last))
    return found


def output_of(y: Tensor, weight: DTensor) -> DTensor:
    """The DTensor of which a rank's product [..., out or its tp_shard] is a part."""
    whole = y.new_empty((*y.shape[:-1], weight.shape[ROWS]), device="meta")
    return _dtensor(y, weight, _by_cut(weight, Shard(y.dim() - 1), Partial()), whole)


def gradient_of(param: Tensor, local: Tensor) -> Tensor:
    """This rank's gradient of its TP shard of a parameter, as autograd wants it."""
    return _dtensor(local, param, param.placements, param) if isinstance(param, DTensor) else local


def _dtensor(local: Tensor, beside: DTensor, placements: Any, like: Tensor) -> DTensor:
    return DTensor.from_local(
        local, beside.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def adds_bias(weight: Tensor) -> bool:
    """True if this rank adds the bias: where y is a term of a sum, the first rank alone."""
    return cut_along(weight) != COLUMNS or not isinstance(weight, DTensor) or weight.device_mesh.get_local_rank() == 0


def take_largest(amax: Tensor, weight: Tensor) -> Tensor:
    """Make the amax of a TP shard that of the whole weight, in place. *Collective* over the axis where it is cut."""
    if isinstance(weight, DTensor) and cut_along(weight) is not None and weight.device_mesh.size() > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=weight.device_mesh.get_group())
    return amax
