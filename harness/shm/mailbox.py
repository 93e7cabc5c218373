"""Ring buffers of int64 in shared memory: one for each pair of ranks and direction, with one writer and one reader.

How many words were written is stored last: a message is read whole or not at all. The lock around each store keeps
processors that reorder them from doing so. A reader stores in its own segment how far it has read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from mmap import mmap
from typing import Any

from harness.shm.segment import ALIGN, TOKEN, aligned, words

RING = 1 << 14
"""Words of a ring, 128 KiB; pages that nobody has come to take no memory."""
_CLOSED, _READ, _BEGIN = 1, 8, 16
"""Words of a mailbox: how many were written, at 0; whether no more will be; how many of the peer's ring were read; the
ring."""
_SIZE = _BEGIN + RING
_WORD = 8


def head_bytes(size: int) -> int:
    """Bytes that the mailboxes of a group of `size` ranks take at the begin of a segment."""
    return aligned(TOKEN) + size * _SIZE * _WORD + ALIGN


class Mailboxes:
    """Messages that this rank writes for its peers, and reads from them.

    Args:
        rank: this one's.
        memories: every rank's mapped segment.
    """

    def __init__(self, rank: int, memories: Sequence[mmap]) -> None:
        self.rank = rank
        size = len(memories)
        self._own = [self._box(memories[rank], peer) for peer in range(size)]
        self._theirs = [self._box(memory, rank) for memory in memories]
        self._written = [0] * size
        self._read = [0] * size
        self._order = threading.Lock()

    @staticmethod
    def _box(memory: mmap, reader: int) -> Any:
        return words(memory, aligned(TOKEN) + reader * _SIZE * _WORD, _SIZE)

    def send(self, peer: int, numbers: Sequence[int]) -> bool:
        """Write one message for a peer; false where there is no room yet. One thread at a time.

        Raises:
            ValueError: it is more than half a ring.
        """
        length = len(numbers) + 1
        if length > RING // 2:
            raise ValueError(f"{len(numbers)} numbers are more than one message may have, {RING // 2 - 1}")
        own, written = self._own[peer], self._written[peer]
        place = written % RING
        skipped = RING - place if place + length > RING else 0
        if written + skipped + length - self._theirs[peer][_READ] > RING:
            return False
        if skipped:
            own[_BEGIN + place] = 0
            place = 0
        begin = _BEGIN + place
        with self._order:
            own[begin : begin + length] = [length, *numbers]
        self._written[peer] = written + skipped + length
        with self._order:
            own[0] = self._written[peer]
        return True

    def receive(self, peer: int) -> list[list[int]]:
        """Messages that a peer has written since this was called last, in order. One thread at a time."""
        ring, read = self._theirs[peer], self._read[peer]
        if ring[0] == read:
            return []
        with self._order:
            written = ring[0]
        found = list[list[int]]()
        with self._order:
            while read < written:
                begin = _BEGIN + read % RING
                length = ring[begin]
                if length:
                    found.append(ring[begin + 1 : begin + length])
                read += length or RING - read % RING
        self._read[peer] = read
        with self._order:
            self._own[peer][_READ] = read
        return found

    def close(self) -> None:
        """Tell all peers that no more will be written."""
        for own in self._own:
            own[_CLOSED] = 1

    def is_closed(self, peer: int) -> bool:
        """True if a peer will write no more."""
        return bool(self._theirs[peer][_CLOSED])
