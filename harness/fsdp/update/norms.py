"""Norms of main gradients and main weights over all ranks, and scaling by them.

A norm is an fp64 tensor of shape [] on the model's device, which the host need not look at to go on.

On a CPU, squares of long tensors are added in fp32 within blocks of 512 elements and in fp64 between them: 6 million
elements take 1.3 ms and err by 2e-10 (fp32: 2e-4, fp64: 28 ms). Where work is queued, sums are fp64, all tensors in one
launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued, scale_together
from harness.fsdp.comm.reduction import norm_from_counters, square_counters
from harness.fsdp.options import Numerics
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import foreach_norm

BLOCK = 512  # elements added in fp32
LONG = 1 << 16  # shorter tensors are summed in fp64
SAFE = (1e-24, 1e30)  # totals for which squares neither vanish nor overflow in fp32; beyond, fp64 is used


def gradient_norm(buckets: Sequence[ParamGroup], everyone: Communicator, numerics: Numerics) -> Tensor:
    """Euclidean norm of the main gradients, equal on all ranks; each parameter counts once. *Collective.*"""
    return _euclidean([(bucket, bucket.grad_shards) for bucket in buckets if bucket.trainable], everyone, numerics)


def weight_norm(buckets: Sequence[ParamGroup], everyone: Communicator, numerics: Numerics) -> Tensor:
    """Euclidean norm of all main weights, frozen ones included. *Collective.*"""
    return _euclidean([(bucket, bucket.main_shards) for bucket in buckets], everyone, numerics)


def _euclidean(shards_of: list[tuple[ParamGroup, list[Tensor]]], everyone: Communicator, numerics: Numerics) -> Tensor:
    """Buckets that every rank holds unsharded are counted by each for itself, others by the first holder of a shard."""
    whole = [shard for bucket, shards in shards_of if bucket.is_whole_everywhere for shard in shards]
    split = [(bucket, shards) for bucket, shards in shards_of if not bucket.is_whole_everywhere]
    counted = [shard for bucket, shards in split for shard in bucket.counted(shards)]
    count = square_counters if numerics.bitwise else sum_of_squares
    device = everyone.runtime.device
    total = count(counted, counted[0].device if counted else device).to(device)
    if split:
        everyone.sum_scalars(total, "norm")
    if whole:
        total += count(whole, whole[0].device).to(device)
    if numerics.bitwise:  # integers of more bits than a device has: the host reads them
        return torch.full((), norm_from_counters(total), dtype=torch.float64, device=device)
    return total.sqrt().reshape(())


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements: fp64, shape [1], on `device`; inf or NaN where an element is."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    if flat and is_queued(flat[0].device):
        return torch.stack(foreach_norm(flat, 2, dtype=torch.float64)).square_().sum().reshape(1).to(device)
    return sum(map(_squares_of, flat), torch.zeros(1, dtype=torch.float64, device=device))


def _squares_of(flat: Tensor) -> Tensor:
    if flat.dtype != torch.float64 and flat.numel() >= LONG:
        even = flat.numel() // BLOCK * BLOCK
        blocks = torch.linalg.vector_norm(flat[:even].view(-1, BLOCK), dim=1, dtype=torch.float32)
        total = _in_double(blocks) + _in_double(flat[even:])
        if SAFE[0] < total.item() < SAFE[1]:
            return total
    return _in_double(flat)


def _in_double(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm.square()


def clip_gradients(buckets: Sequence[ParamGroup], norm: Tensor, max_norm: float) -> None:
    """Scale the main gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    norm: fp64, shape [], on the model's device. The host reads it only where it has the gradients.
    """
    # a number / a tensor is rounded twice in torch
    coefficient = torch.div(torch.tensor(max_norm, dtype=norm.dtype), norm + 1e-6)
    coefficient.clamp_(max=1.0)  # NaN stays
    held_by_host = any(bucket.gradients is not None and bucket.gradients.is_offloaded for bucket in buckets)
    scale_gradients(buckets, float(coefficient) if held_by_host else coefficient)


def scale_gradients(buckets: Sequence[ParamGroup], factor: float | Tensor) -> None:
    """Multiply the finished main gradients; padding is zeroed again after a factor that is not finite."""
    scale_together([shard for bucket in buckets for shard in bucket.grad_shards], factor)
    is_unseen = isinstance(factor, Tensor) and is_queued(factor.device)  # the host does not look at it
    if is_unseen or not math.isfinite(factor):
        for bucket in buckets:
            if bucket.gradients is not None:
                bucket.gradients.open_gaps()
