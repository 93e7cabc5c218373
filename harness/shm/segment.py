"""One rank's shared memory: mailboxes for its peers, then a heap of blocks that they may read.

Mailboxes are ring buffers of int64: one for each pair of ranks and direction, with one writer and one reader. How many
words were written is stored last, under a lock that keeps processors from reordering stores: a message is read whole or
not at all. A reader stores in its own segment how far it has read.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
"""Blocks begin on multiples of this many bytes."""

memory_observers: list[Callable[[int], None]] = []
"""Called with the bytes of each block of this process that is handed out, negative where it is given back."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


class Segment:
    """This rank's segment. Raises OSError: the system gives no such memory.

    Args:
        head: bytes in front of the heap.
        capacity: of the whole segment, in bytes; None: all memory of the host.
    """

    def __init__(self, head: int, capacity: int | None = None) -> None:
        self.size = capacity or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.file = os.memfd_create("shm-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.fchmod(self.file, 0o600)
        os.ftruncate(self.file, self.size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.inode, head = os.fstat(self.file).st_ino, aligned(max(head, 1))
        os.posix_fallocate(self.file, 0, head)
        self.memory = mmap.mmap(self.file, self.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._reserved = head
        # begin and end of free blocks, in order, none of which touch; the last one is as large as a system gives
        self._free = [(head, sys.maxsize)]
        self._given_back: deque[tuple[int, int]] = deque()

    def allocate(self, num_bytes: int) -> tuple[int, Tensor]:
        """A block, uninitialised: where it begins, and its bytes. It is free again when no tensor uses it. Raises
        RuntimeError: there is no more memory."""
        length = aligned(max(num_bytes, 1))
        begin = self._find(length)
        block = (ctypes.c_char * max(num_bytes, 1)).from_buffer(self.memory, begin)
        weakref.finalize(block, _give_back, self._given_back, begin, length).atexit = False
        for observer in memory_observers:
            observer(length)
        return begin, torch.frombuffer(block, dtype=torch.uint8)

    def find(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in the segment; None where it lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 < offset < self.size else None

    def _find(self, length: int) -> int:
        if given_back := [self._given_back.popleft() for _ in range(len(self._given_back))]:
            blocks, self._free = sorted([*self._free, *given_back]), []
            for begin, end in blocks:
                is_next = bool(self._free) and self._free[-1][1] == begin
                self._free.append((self._free.pop()[0] if is_next else begin, end))
        place = next(place for place, (begin, end) in enumerate(self._free) if end - begin >= length)
        begin, end = self._free[place]
        if (more := begin + length - self._reserved) > 0:
            try:
                if begin + length > self.size:
                    raise OSError(f"the segment has {self.size:,} bytes")
                os.posix_fallocate(self.file, self._reserved, more)
            except OSError as error:
                raise RuntimeError(f"no {more:,} bytes of shared memory beyond {self._reserved:,}: {error}") from error
            self._reserved += more
        self._free[place : place + 1] = [(begin + length, end)] if end - begin > length else []
        return begin


def _give_back(given_back: deque[tuple[int, int]], begin: int, length: int) -> None:
    given_back.append((begin, begin + length))
    for observer in memory_observers:
        observer(-length)


def view(memory: mmap.mmap, begin: int, like: Tensor) -> Tensor:
    """Bytes from `begin` on as a tensor of the shape and dtype of `like`."""
    if not like.numel():
        return like.detach()
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)


class Peer:
    """Another rank's process and its segment, mapped. Raises OSError: the system refuses, or the descriptor is of
    another file."""

    def __init__(self, pid: int, file: int, size: int, inode: int) -> None:
        self.pid, self._path, self._inode = pid, f"/proc/{pid}/fd/{file}", inode
        with open(self._path, "r+b", buffering=0) as opened:
            found = os.fstat(opened.fileno())
            if (found.st_size, found.st_ino) != (size, inode):
                raise OSError(f"descriptor {file} of process {pid} is of another file, of {found.st_size:,} bytes")
            self.memory = mmap.mmap(opened.fileno(), size)

    def lives(self) -> bool:
        """True if the process still has its segment open."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError as error:
            return not isinstance(error, FileNotFoundError)


RING = 1 << 14
"""Words of a ring, 128 KiB; pages that nobody has come to take no memory."""
_CLOSED, _READ, _BEGIN = 1, 8, 16
"""Words of a mailbox: how many were written, at 0; whether no more will be; how many of the peer's ring were read; the
ring."""
_SIZE = _BEGIN + RING
_WORD = 8


def head_bytes(size: int) -> int:
    """Bytes that the mailboxes of a group of `size` ranks take at the begin of a segment."""
    return size * _SIZE * _WORD


class Mailboxes:
    """Messages that this rank writes for its peers, and reads from them.

    Args:
        rank: this one's.
        memories: every rank's mapped segment.
    """

    def __init__(self, rank: int, memories: Sequence[mmap.mmap]) -> None:
        size = len(memories)
        self._own = [self._box(memories[rank], peer) for peer in range(size)]
        self._theirs = [self._box(memory, rank) for memory in memories]
        self._written = [0] * size
        # messages for which there was no room yet, as the peer is far behind
        self._unsent = [deque[Sequence[int]]() for _ in memories]
        self._read = [0] * size
        self._order = threading.Lock()

    @staticmethod
    def _box(memory: mmap.mmap, reader: int) -> Any:
        return (ctypes.c_int64 * _SIZE).from_buffer(memory, reader * _SIZE * _WORD)

    def send(self, peer: int, numbers: Sequence[int]) -> None:
        """Write one message for a peer; where there is no room yet, when this rank comes here, or to `receive`, again.
        One thread at a time. Raises ValueError: it is more than a ring."""
        if len(numbers) >= RING:
            raise ValueError(f"{len(numbers)} numbers are more than one message may have, {RING - 1}")
        self._unsent[peer].append(numbers)
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        own, unsent = self._own[peer], self._unsent[peer]
        while unsent:
            begin, numbers = self._written[peer], unsent[0]
            end = begin + 1 + len(numbers)
            if end - self._theirs[peer][_READ] > RING:
                return
            with self._order:
                for place, word in enumerate((len(numbers), *numbers), begin):
                    own[_BEGIN + place % RING] = word
            self._written[peer] = end
            with self._order:
                own[0] = end
            unsent.popleft()

    def receive(self, peer: int) -> list[list[int]]:
        """Messages that a peer has written since this was called last, in order. One thread at a time."""
        self._flush(peer)
        ring, read = self._theirs[peer], self._read[peer]
        if ring[0] == read:
            return []
        with self._order:
            written = ring[0]
        found = list[list[int]]()
        with self._order:
            while read < written:
                begin, read = read + 1, read + 1 + ring[_BEGIN + read % RING]
                found.append([ring[_BEGIN + place % RING] for place in range(begin, read)])
        self._read[peer] = read
        with self._order:
            self._own[peer][_READ] = read
        return found

    def close(self) -> None:
        """Tell all peers that no more will be written."""
        for own in self._own:
            own[_CLOSED] = 1

    def is_closed(self, peer: int) -> bool:
        return bool(self._theirs[peer][_CLOSED])
