"""Scaling of main gradients by one factor, as clipping does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.together import scale_together
from harness.fsdp.storage.bucket import Bucket


def clip_gradients(buckets: Sequence[Bucket], norm: Tensor, max_norm: float) -> None:
    """Scale the main gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    norm: fp64, shape [], on the model's device. The host does not look at it, unless it has the gradients.
    """
    bound = torch.tensor(max_norm, dtype=norm.dtype)  # a number / a tensor is rounded twice in torch
    coefficient = torch.div(bound, norm + 1e-6)
    coefficient.clamp_(max=1.0)  # NaN stays
    held_by_host = any(bucket.gradients is not None and bucket.gradients.is_offloaded for bucket in buckets)
    scale_gradients(buckets, float(coefficient) if held_by_host else coefficient)


def scale_gradients(buckets: Sequence[Bucket], factor: float | Tensor) -> None:
    """Multiply the main gradients, which are finished, by a factor; one that is not finite is forgotten with them."""
    scale_together([shard for bucket in buckets for shard in bucket.grad_shards], factor)
    is_unseen = isinstance(factor, Tensor) and is_queued(factor.device)  # the host does not look at it
    if is_unseen or not math.isfinite(factor):
        for bucket in buckets:
            if bucket.gradients is not None:
                bucket.gradients.open_gaps()
