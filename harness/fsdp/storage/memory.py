"""Where temporary buckets come from, and how many bytes of them are alive.

A gathered bucket is one tensor whose storage is emptied on release and filled again before the next use. Tensors that
autograd saved in the forward are views of that storage, so the backward finds the gathered weights in them without
holding memory in between.

With fixed buffers nothing is allocated after the first step: the gathered weights of all units but the root's lie in
two buffers, those of even and of odd units, each as large as its largest unit. Two units alive at once is then a limit,
not a habit. Unreduced gradients take two more. Units of one buffer share its storage, and take turns: what autograd
saved finds the unit's weights there again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.shm import ShmGroup

ALIGN_BYTES = 256  # of places in a shared buffer


class SharedBuffer:
    """Memory that grows while units are placed in it, and never after. Units take turns in it.

    user: number of the unit that has its turn. filled: addresses of that unit's buckets in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.user: int | None = None
        self.filled: set[int] = set()
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.cursor = 0  # in the unit being built

    def place(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor behind those placed before, whose contents are undefined."""
        end = self.cursor + -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        if end > self.storage.nbytes():
            self.storage.resize_(end)
        bucket = torch.empty(0, dtype=dtype, device=self.storage.device)
        bucket.set_(self.storage, self.cursor // dtype.itemsize, (numel,), (1,))
        self.cursor = end
        return bucket


class BucketMemory:
    """Allocates and frees temporary buckets of one device; only this class frees them.

    Args:
        device: of all buckets.
        fixed: under double_buffer.
        moved: hands out what a backend moves without a copy of its own; None: there is no such memory.
        allocating: surrounds every allocation of what collectives move; None: nothing does.
        registers: whether what is allocated so is, or will be, a user buffer: no sharded parameter views it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        fixed: bool = False,
        moved: UserBuffers | ShmGroup | None = None,
        allocating: Callable[[], AbstractContextManager[object]] | None = None,
        registers: bool = False,
    ) -> None:
        self.device, self.fixed, self.moved, self.registers = device, fixed, moved, registers
        self.allocating = allocating or nullcontext
        self.live_bytes = self.peak_bytes = 0
        self._spare: list[Tensor] = []
        self._shared: list[SharedBuffer] = []
        # by address of the tensor object: buckets that lie in a shared buffer, and the numbers of their units
        self._placed: dict[int, tuple[SharedBuffer, int]] = {}
        self._buffer: SharedBuffer | None = None  # of the unit being built
        self._num_units = 0

    @contextmanager
    def unit(self, *, shares: bool) -> Iterator[None]:
        """Buckets made in the body belong to one unit; `shares`: to one that takes turns with the others."""
        if shares and self.fixed:
            if len(self._shared) < 2:
                self._shared.append(SharedBuffer(self.device))
            self._buffer = self._shared[self._num_units % 2]
            self._buffer.cursor = 0
            self._num_units += 1
        yield
        self._buffer = None

    def transient(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A bucket for gathered weights, shape [numel]: to be emptied when views of it are made."""
        if self._buffer is not None:
            with self.allocating():
                bucket = self._buffer.place(numel, dtype)
            self._placed[id(bucket)] = self._buffer, self._num_units
            self.live_bytes = self.peak_bytes = sum(each.storage.nbytes() for each in self._shared)
            return bucket
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty(self, bucket: Tensor) -> None:
        """Take the storage of a bucket that was just made: it never was in use."""
        if id(bucket) not in self._placed:
            bucket.untyped_storage().resize_(0)

    def persistent(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self.allocating():
            return torch.zeros(numel, dtype=dtype, device=self.device)

    def weights(self, numel: int, dtype: torch.dtype, shm: ShmGroup | None) -> Tensor:
        """As `persistent`; ranks of one host read it in place, unless it is a user buffer."""
        if shm is None or self.registers:
            return self.persistent(numel, dtype)
        return shm.allocate(numel, dtype).zero_()

    def unmoved(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        """Zeros that stay and that no collective moves, shape [numel].

        on_host: in the host's memory; pinned where work is queued, so that copies there run beside it.
        """
        if not on_host:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        zeros = torch.zeros(numel, dtype=dtype)
        return zeros.pin_memory() if is_queued(self.device) else zeros

    def has_room(self, bucket: Tensor) -> bool:
        placed = self._placed.get(id(bucket))
        return placed is None or placed[0].user in (None, placed[1])

    def refill(self, bucket: Tensor) -> None:
        """Give a bucket its storage back, uninitialised. Raises ValueError: its place is taken: more than two units are
        wanted at once."""
        if (placed := self._placed.get(id(bucket))) is not None:
            if not self.has_room(bucket):
                raise ValueError(
                    "a third unit's weights are wanted while both buffers are in use: under double_buffer at most two"
                    " units are alive, and neighbours take turns. Units that run inside one another or far out of"
                    " order need double_buffer=False"
                )
            placed[0].user = placed[1]
            placed[0].filled.add(id(bucket))
            return
        if not bucket.untyped_storage().nbytes():
            with self.allocating():
                bucket.untyped_storage().resize_(bucket.numel() * bucket.itemsize)
            self.note(bucket)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A bucket of undefined contents, shape [numel]: a spare one where it fits, which needs no new pages."""
        wanted = numel * dtype.itemsize
        for index, spare in enumerate(self._spare):
            if spare.untyped_storage().nbytes() == wanted or (self.fixed and spare.nbytes >= wanted):
                return _reshaped(self._spare.pop(index), numel, dtype)
        if self._spare:
            self.free(self._spare.pop(0))
        return self.note(self._empty(numel, dtype))

    def sums(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that stay and are reduced where they are, shape [numel]."""
        return self._empty(numel, dtype).zero_()

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.moved is not None:
            return self.moved.allocate(numel, dtype)
        with self.allocating():
            return torch.empty(numel, dtype=dtype, device=self.device)

    def give_back(self, bucket: Tensor) -> None:
        """Keep a bucket that `take` gave as a spare one; it stays alive until it is taken or released."""
        if not self.fixed:
            self.release_spare()
        self._spare.append(_reshaped(bucket, bucket.untyped_storage().nbytes() // bucket.itemsize, bucket.dtype))

    def note(self, bucket: Tensor) -> Tensor:
        """Count a bucket until `free` takes it; returns it."""
        self.live_bytes += bucket.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return bucket

    def release_spare(self) -> None:
        while self._spare and not self.fixed:
            self.free(self._spare.pop())

    def release(self, bucket: Tensor) -> None:
        """Free a bucket that is filled again. Its memory stays where numpy has seen it and may hold it."""
        if bucket.untyped_storage().resizable() or id(bucket) in self._placed:
            self.free(bucket)

    def free(self, bucket: Tensor) -> None:
        """Empty a bucket's storage, or leave its place to others; freeing one twice does nothing."""
        if (placed := self._placed.get(id(bucket))) is not None:
            placed[0].filled.discard(id(bucket))
            if not placed[0].filled:
                placed[0].user = None
            return
        storage = bucket.untyped_storage()
        if nbytes := storage.nbytes():
            self.live_bytes -= nbytes
            if storage.resizable():
                storage.resize_(0)
            else:  # shared memory, which is free when no view of it is left
                bucket.set_(torch.UntypedStorage(0), 0, (0,), (1,))

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes


def _reshaped(bucket: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    if bucket.numel() == numel and bucket.dtype == dtype:
        return bucket
    return torch.empty(0, dtype=dtype, device=bucket.device).set_(bucket.untyped_storage(), 0, (numel,), (1,))
