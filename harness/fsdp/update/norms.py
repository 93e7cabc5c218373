"""Norms over all ranks: of a model's main gradients, and of its main weights.

A norm is an fp64 tensor of shape [] on the model's device, which the host need not look at to go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm import order_free_norm
from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update.squares import sum_of_squares
from harness.fsdp.vocabulary import Numerics

_BLOCK = 1 << 20
"""Elements widened at a time."""


def gradient_norm(buckets: Sequence[Bucket], everyone: Everyone, numerics: Numerics) -> Tensor:
    """Euclidean norm of the whole main gradient, equal on all ranks; each parameter counts once. *Collective.*"""
    return _euclidean([(bucket, bucket.grad_shards) for bucket in buckets if bucket.trainable], everyone, numerics)


def weight_norm(buckets: Sequence[Bucket], everyone: Everyone, numerics: Numerics) -> Tensor:
    """Euclidean norm of all main weights, frozen ones included. *Collective.*"""
    return _euclidean([(bucket, bucket.main_shards) for bucket in buckets], everyone, numerics)


def _euclidean(shards_of: list[tuple[Bucket, list[Tensor]]], everyone: Everyone, numerics: Numerics) -> Tensor:
    """Order-free where bits may not depend on the layout (`harness.fsdp.comm.order_free_norm`), else fp64 squares.

    Buckets that every rank holds whole are counted by each for itself, the others by the first rank that holds a shard.
    """
    whole, counted, split = _dealt(shards_of)
    count = order_free_norm.square_counters if numerics.bitwise else sum_of_squares
    device = everyone.runtime.device
    total = count(counted, _device_of(counted, device)).to(device)
    if split:
        everyone.sum_scalars(total, "norm")
    if whole:
        total += count(whole, _device_of(whole, device)).to(device)
    if numerics.bitwise:  # integers of more bits than a device has: the host reads them
        return torch.full((), order_free_norm.norm_from_counters(total), dtype=torch.float64, device=device)
    return total.sqrt().reshape(())


def _dealt(shards_of: Sequence[tuple[Bucket, list[Tensor]]]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Shards that every rank holds, shards this rank counts for all that hold them, and whether any are split."""
    whole = [shard for bucket, shards in shards_of if bucket.is_whole_everywhere for shard in shards]
    split = [(bucket, shards) for bucket, shards in shards_of if not bucket.is_whole_everywhere]
    counted = [shard for bucket, shards in split for shard in bucket.counted(shards)]
    return whole, counted, bool(split)


def gradient_p_norm(buckets: Sequence[Bucket], everyone: Everyone, numerics: Numerics, p: float) -> Tensor:
    """The p-norm of the whole main gradient, p positive or inf, equal on all ranks. *Collective.*

    Raises:
        ValueError: p is neither; or it is not inf, and `numerics` promises bits that do not depend on the layout.
    """
    if not p > 0:
        raise ValueError(f"norm_type={p} must be a positive number or inf")
    whole, counted, _ = _dealt([(bucket, bucket.grad_shards) for bucket in buckets if bucket.trainable])
    if math.isinf(p):
        return _largest([*whole, *counted], everyone)
    if numerics.bitwise:
        raise ValueError(
            f"norm_type={p} with numerics={numerics.name}: bits of a sum of such powers would depend on the layout; use"
            " norm_type 2 or inf, or numerics=fast"
        )
    device = everyone.runtime.device
    total = everyone.sum_scalars(_sum_of_powers(counted, p, device), "norm") + _sum_of_powers(whole, p, device)
    return total.pow(1.0 / p).reshape(())


def _sum_of_powers(shards: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Sum of |x|^p over all elements: fp64, shape [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for shard in shards:
        for block in shard.detach().split(_BLOCK):
            total += block.double().abs().pow(p).sum().to(device)
    return total


def _largest(shards: Sequence[Tensor], everyone: Everyone) -> Tensor:
    """The largest |x| on any rank; NaN where an element is."""
    largest = torch.zeros(everyone.size, dtype=torch.float64, device=everyone.runtime.device)
    found = [shard.detach().abs().amax().double().to(largest.device) for shard in shards if shard.numel()]
    largest[everyone.rank] = torch.stack(found).amax() if found else 0.0
    return everyone.sum_scalars(largest, "norm").amax()


def _device_of(shards: Sequence[Tensor], fallback: torch.device) -> torch.device:
    return shards[0].device if shards else fallback
