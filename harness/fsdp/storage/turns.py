"""Buffers in which units take turns ([Note: Double buffer])."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.private_torch import swap_memory

ALIGN_BYTES = 256
"""Places in a shared buffer begin on multiples of this."""
CAN_SWAP = bool(swap_memory)
"""From torch 2.12 on; before, all units share one storage, and a view kept past its unit's turn shows another's."""


class SharedBuffer:
    """Memory that grows while units are placed in it, and never after.

    nbytes: its size. user: the unit that has its turn, whose storage has the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self.user: Turn | None = None
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        """Has the memory while no unit has its turn."""


class Turn:
    """One unit's part in a shared buffer: a storage that has the buffer's memory from `begin` to `end`.

    filled: addresses of the tensor objects of its buckets whose contents the buffer has now.
    """

    def __init__(self, buffer: SharedBuffer) -> None:
        self.filled: set[int] = set()
        self._buffer = buffer
        self._cursor = 0
        self._storage = torch.UntypedStorage(0, device=buffer.device) if CAN_SWAP else buffer.storage

    def place(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor behind those placed before, whose contents are undefined; the turn has begun."""
        end = self._cursor + -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        if end > self._buffer.nbytes:
            self._storage.resize_(end)
            self._buffer.nbytes = end
        bucket = torch.empty(0, dtype=dtype, device=self._buffer.device)
        bucket.set_(self._storage, self._cursor // dtype.itemsize, (numel,), (1,))
        self._cursor = end
        return bucket

    @property
    def can_begin(self) -> bool:
        """True if no other unit uses the buffer."""
        return self._buffer.user is None or self._buffer.user is self

    def begin(self) -> None:
        """Have the memory."""
        if self._buffer.user is not self:
            self._exchange()
            self._buffer.user = self

    def end(self) -> None:
        """Leave the memory to others."""
        if self._buffer.user is self:
            self._exchange()
            self._buffer.user = None

    def renew(self, bucket: Tensor) -> bool:
        """Give one of its buckets other storage, as `BucketMemory.renew`; the buffer gets other memory with it.
        False where all units share one storage."""
        if self._storage is self._buffer.storage:
            return False
        if not self._storage.resizable():
            self._storage = torch.UntypedStorage(self._buffer.nbytes, device=self._buffer.device)
        bucket.set_(self._storage, bucket.storage_offset(), bucket.shape, bucket.stride())
        return True

    def _exchange(self) -> None:
        if self._storage is not self._buffer.storage:
            swap_memory(self._storage, self._buffer.storage)
