"""FP8 layers whose weight a plan of tensor parallelism has cut: what each rank multiplies, and what that is a part of.

[Note: FP8 and tensor parallelism] A plan makes the weight [out, in] a DTensor, and each rank multiplies its portion of
it: of rows (torch's `ColwiseParallel`: x whole, y cut along its last dimension) or of columns (`RowwiseParallel`: x cut
along its last dimension, y a term of a sum). What is reduced where:

- A weight's amax is that of the whole weight, so the largest over the tensor-parallel axis too: a weight is state, and
  its bits must not depend on how it lies.
- Amaxes of activations and gradients are of what this rank multiplies, as in TransformerEngine: nothing else is
  multiplied with them, and each product would wait for a collective.

Under `delayed`, amaxes of all three become those of all ranks at the end of a step, so that scales of the next are the
same everywhere. Tiles of the other recipes lie within a portion: both its sizes must be multiples of the tile's.

A bias of a layer whose y is a term of a sum is added by the first rank alone.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

ROWS, COLUMNS = 0, 1
"""Dimensions of a weight [out, in]."""


def portion_here(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, plain and outside autograd: a DTensor's local tensor; any other, itself."""
    held: Any = tensor
    local: Tensor = held._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()


def cut_along(weight: Tensor) -> int | None:
    """The dimension along which a plan has cut a weight; None where this rank has all of it."""
    if not isinstance(weight, DTensor):
        return None
    placement = weight.placements[0]
    return placement.dim if isinstance(placement, Shard) else None


def input_here(x: Tensor, weight: DTensor) -> Tensor:
    """What this rank multiplies of x [..., in]. *Collective* where x lies otherwise than the weight asks for.

    Args:
        x: plain, the same on every rank of the axis; or a DTensor.
    """
    mesh, last = weight.device_mesh, x.dim() - 1
    lying = {None: Replicate(), ROWS: Replicate(), COLUMNS: Shard(last)}
    gradient: dict[int | None, Placement] = {None: Replicate(), ROWS: Partial(), COLUMNS: Shard(last)}
    along = cut_along(weight)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    found: Tensor = x.redistribute(placements=[lying[along]]).to_local(grad_placements=[gradient[along]])
    return found


def output_of(y: Tensor, weight: DTensor) -> DTensor:
    """What a rank's product [..., out or its portion] is a part of."""
    placement: dict[int | None, Placement] = {None: Replicate(), ROWS: Shard(y.dim() - 1), COLUMNS: Partial()}
    whole = y.new_empty((*y.shape[:-1], weight.shape[ROWS]), device="meta")
    return DTensor.from_local(
        y,
        weight.device_mesh,
        [placement[cut_along(weight)]],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def adds_bias(weight: Tensor) -> bool:
    """Whether this rank adds the bias to its product."""
    return cut_along(weight) != COLUMNS or not isinstance(weight, DTensor) or weight.device_mesh.get_local_rank() == 0


def gradient_of(param: Tensor, local: Tensor) -> Tensor:
    """This rank's gradient of its portion of a parameter, as autograd wants it."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def take_largest(amax: Tensor, weight: Tensor) -> Tensor:
    """Make the amax of a portion that of the whole weight, in place. *Collective* over the axis where it is cut."""
    if isinstance(weight, DTensor) and cut_along(weight) is not None and weight.device_mesh.size() > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=weight.device_mesh.get_group())
    return amax
