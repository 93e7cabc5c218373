"""One rank's shared memory: mailboxes for its peers, then a heap of blocks that they may read."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
"""Blocks begin on multiples of this many bytes."""
TOKEN = ctypes.sizeof(ctypes.c_int64)


_watching: list[Callable[[int], None]] = []


def watch_memory(told: Callable[[int], None]) -> Callable[[], None]:
    """Tell of each block of this process that is handed out: its bytes, negative where it is given back.

    Returns what ends that.
    """
    _watching.append(told)
    return lambda: _watching.remove(told)


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-num_bytes // ALIGN) * ALIGN


class Segment:
    """This rank's segment.

    Args:
        head: bytes in front of the heap.
        capacity: of the whole segment, in bytes; None: all memory of the host.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, head: int, capacity: int | None = None) -> None:
        self.size = capacity or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.file = os.memfd_create("shm-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.fchmod(self.file, 0o600)
        os.ftruncate(self.file, self.size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        head = aligned(TOKEN + head)
        os.posix_fallocate(self.file, 0, head)
        self.memory = mmap.mmap(self.file, self.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.token = secrets.randbits(62)
        words(self.memory, 0, 1)[0] = self.token
        self._reserved = head
        self._free: list[tuple[int, int]] = []
        """Begin and end of free blocks, in order, none of which touch."""
        self._given_back: deque[tuple[int, int]] = deque()

    def allocate(self, num_bytes: int) -> tuple[int, Tensor]:
        """A block, uninitialised: where it begins, and its bytes. It is free again when no tensor uses it.

        Raises:
            RuntimeError: there is no more memory.
        """
        length = aligned(max(num_bytes, 1))
        begin = self._find(length)
        block = (ctypes.c_char * max(num_bytes, 1)).from_buffer(self.memory, begin)
        weakref.finalize(block, _give_back, self._given_back, begin, length).atexit = False
        for told in _watching:
            told(length)
        return begin, torch.frombuffer(block, dtype=torch.uint8)

    def find(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in the segment; None where it lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 < offset < self.size else None

    def _find(self, length: int) -> int:
        while self._given_back:
            self._join(*self._given_back.popleft())
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                self._free[place : place + 1] = [(begin + length, end)] if end - begin > length else []
                return begin
        has_tail = bool(self._free) and self._free[-1][1] == self._reserved
        begin = self._free[-1][0] if has_tail else self._reserved
        self._reserve(begin + length)
        if has_tail:
            self._free.pop()
        return begin

    def _reserve(self, end: int) -> None:
        try:
            if end > self.size:
                raise OSError(f"the segment has {self.size:,} bytes")
            os.posix_fallocate(self.file, self._reserved, end - self._reserved)
        except OSError as error:
            wanted = end - self._reserved
            raise RuntimeError(f"no {wanted:,} bytes of shared memory beyond {self._reserved:,}: {error}") from error
        self._reserved = end

    def _join(self, begin: int, end: int) -> None:
        before = [each for each in self._free if each[0] < begin]
        after = self._free[len(before) :]
        if before and before[-1][1] == begin:
            begin = before.pop()[0]
        if after and after[0][0] == end:
            end = after.pop(0)[1]
        self._free = [*before, (begin, end), *after]


def _give_back(given_back: deque[tuple[int, int]], begin: int, length: int) -> None:
    given_back.append((begin, begin + length))
    for told in _watching:
        told(-length)


def words(memory: mmap.mmap, begin: int, count: int) -> Any:
    """`count` int64 from byte `begin` on, to read and to write."""
    return (ctypes.c_int64 * count).from_buffer(memory, begin)


def view(memory: mmap.mmap, begin: int, like: Tensor) -> Tensor:
    """Bytes from `begin` on as a tensor of the shape and dtype of `like`."""
    if not like.numel():
        return like.detach()
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)


def open_peer(pid: int, file: int, size: int, token: int) -> tuple[mmap.mmap, int]:
    """Map a peer's segment: its bytes, and the number of its inode.

    Raises:
        OSError: the system refuses, or the descriptor is of another file.
    """
    descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_size != size:
            raise OSError(f"the segment of process {pid} has {found.st_size:,} bytes, not {size:,}")
        memory = mmap.mmap(descriptor, size)
        if words(memory, 0, 1)[0] != token:
            raise OSError(f"descriptor {file} of process {pid} is of another file")
        return memory, found.st_ino
    finally:
        os.close(descriptor)
