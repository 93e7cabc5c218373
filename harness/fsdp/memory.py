"""Where temporary buckets come from, and how many bytes of them are alive.

[Note: Freed storage] A gathered bucket is one tensor whose storage is emptied on release and filled again before the
next use. Tensors that autograd saved in the forward are views of that storage, so the backward finds the gathered
weights in them without holding memory in between. While a unit is released its parameters point at one NaN, expanded
to their shape: reading a released weight gives NaN in the right shape, never a stray address.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from harness.fsdp.registration import Allocating


class BucketMemory:
    """Allocates and frees temporary buckets of one device; only this class frees them."""

    def __init__(self, device: torch.device, allocating: Allocating = nullcontext) -> None:
        self.device = device
        self.allocating = allocating
        """Surrounds every allocation of a bucket, also of those that stay."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self._spare: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A bucket of undefined contents, shape [numel]: the spare one where it fits, which needs no new pages."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() == numel and spare.dtype == dtype:
            return spare
        if spare is not None:
            self.free(spare)
        with self.allocating():
            return self._count(torch.empty(numel, dtype=dtype, device=self.device))

    def give_back(self, bucket: Tensor) -> None:
        """Keep a bucket that `take` gave as the spare one; it stays alive until it is taken or released."""
        self.release_spare()
        self._spare = bucket

    def release_spare(self) -> None:
        """Free the spare bucket."""
        if self._spare is not None:
            self.free(self._spare)
            self._spare = None

    def refill(self, bucket: Tensor) -> None:
        """Give a bucket whose storage was emptied its storage back, uninitialised."""
        with self.allocating():
            bucket.untyped_storage().resize_(bucket.numel() * bucket.itemsize)
        self._count(bucket)

    def free(self, bucket: Tensor) -> None:
        """Empty a bucket's storage; freeing one twice does nothing."""
        storage = bucket.untyped_storage()
        self.live_bytes -= storage.nbytes()
        storage.resize_(0)

    def _count(self, bucket: Tensor) -> Tensor:
        self.live_bytes += bucket.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return bucket


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN of this shape that takes one element of memory; see [Note: Freed storage]."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
