"""Scaling of main gradients by one factor, as clipping does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.fsdp.comm.together import scale_together
from harness.fsdp.storage.bucket import Bucket


def clip_gradients(buckets: Sequence[Bucket], norm: float, max_norm: float) -> None:
    """Scale the main gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0 or math.isnan(coefficient):
        scale_gradients(buckets, coefficient)


def scale_gradients(buckets: Sequence[Bucket], factor: float) -> None:
    """Multiply the main gradients, which are finished, by a factor."""
    scale_together([shard for bucket in buckets for shard in bucket.grad_shards], factor)
