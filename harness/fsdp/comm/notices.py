"""Messages between ranks of one host about buffers, through memory that all of them have mapped.

[Note: Notices] A rank's board is a file without a name in memory, with a ring for each peer: what it tells that peer,
in order, and how far it has heard the peer's own ring. Telling and hearing are stores and loads, where a message
through a socket costs both processes a system call, a change of threads and some 100 us. One rank writes a ring and one
reads it. How many words it has been given stands in it and is written last: what is counted is whole. The lock around
each keeps processors that reorder stores or loads from doing so. A board outlives the process that wrote it as long as
others have it mapped: what a rank told before it ended is heard. Of a process that was killed it tells nothing: who
waits looks for that itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

RING = 1 << 14
"""Words of a ring, 128 KiB; pages that nobody has come to take no memory."""
_ENDS, _HEARD, _BEGIN = 1, 8, 16
"""Places in a peer's part of a board, in words: how much was told, at 0; whether no more will be. In other cache lines,
how much of the peer's own ring is heard; the ring."""
_PART = _BEGIN + RING
_WORD = ctypes.sizeof(ctypes.c_int64)


def is_there() -> bool:
    return hasattr(os, "memfd_create")


class Notices:
    """This rank's board and those of the others; see [Note: Notices].

    Args:
        rank: this one's. size: ranks of the group.

    Raises:
        OSError: the system gives no memory for it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size
        self.file = os.memfd_create("fsdp-notices", os.MFD_CLOEXEC)
        os.ftruncate(self.file, size * _PART * _WORD)
        self._own = _mapped(self.file, size)
        self._others: dict[int, ctypes.Array[ctypes.c_int64]] = {}
        self._told = [0] * size
        self._heard = [0] * size
        self._order = threading.Lock()

    def join(self, peer: int, pid: int, file: int) -> None:
        """Map the board of a peer: a process, and its descriptor there.

        Raises:
            OSError: the system refuses.
        """
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._others[peer] = _mapped(descriptor, self._size)
        except ValueError as error:  # another file, and a shorter one
            raise OSError(str(error)) from error
        finally:
            os.close(descriptor)

    def close_file(self) -> None:
        os.close(self.file)

    def tell(self, peer: int, numbers: Sequence[int]) -> bool:
        """Tell a peer some int64; whether there was room. One thread at a time.

        Raises:
            ValueError: they are more than half a ring.
        """
        words = len(numbers) + 1
        if words > RING // 2:
            raise ValueError(f"{len(numbers)} numbers are more than one notice may have, {RING // 2 - 1}")
        own, part, told = self._own, peer * _PART, self._told[peer]
        place = told % RING
        skipped = RING - place if place + words > RING else 0
        if told + skipped + words - self._others[peer][self.rank * _PART + _HEARD] > RING:
            return False
        if skipped:
            own[part + _BEGIN + place] = 0
            place = 0
        begin = part + _BEGIN + place
        with self._order:
            own[begin : begin + words] = [words, *numbers]
        self._told[peer] = told + skipped + words
        with self._order:
            own[part] = self._told[peer]
        return True

    def end(self) -> None:
        for peer in self._others:
            self._own[peer * _PART + _ENDS] = 1

    def has_ended(self, peer: int) -> bool:
        """True if a peer has told that it will tell nothing more."""
        return self._others[peer][self.rank * _PART + _ENDS] != 0

    def has_news(self, peer: int) -> bool:
        return self._others[peer][self.rank * _PART] != self._heard[peer]

    def hear(self, peer: int) -> list[list[int]]:
        """Messages of a peer since this was asked last, in order. One thread at a time."""
        ring, part = self._others[peer], self.rank * _PART
        with self._order:
            told = ring[part]
        found, heard = list[list[int]](), self._heard[peer]
        with self._order:
            while heard < told:
                begin = part + _BEGIN + heard % RING
                words = ring[begin]
                if words:
                    found.append(ring[begin + 1 : begin + words])
                heard += words or RING - heard % RING
        self._heard[peer] = heard
        with self._order:
            self._own[peer * _PART + _HEARD] = heard
        return found


def _mapped(file: int, size: int) -> ctypes.Array[ctypes.c_int64]:
    words = size * _PART
    return (ctypes.c_int64 * words).from_buffer(mmap.mmap(file, words * _WORD))
