"""A board on which a rank notes what it has laid out for its peers, and which these read from its memory.

[Note: Notices] Each peer and tag has a place: a stamp, which is made of the tag and of how often something was laid out
under it, and what the message beside it says. A notice is only taken for what it is: a reader knows the stamp that it
waits for, and finds it before and after it has read the rest. Tags that share a place, and later notices of the same
tag, push earlier ones out, and what is long has none: then the message is waited for as ever. The stamp is taken away
before the rest changes and set after it; the lock around each keeps processors that reorder stores from doing so.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Sequence

from harness.fsdp.comm.cross_memory import WORD, words_from

PLACES = 1024
"""Tags that a rank has notices of at a time, for each peer."""
LONGEST = 14
"""Numbers in a notice at most."""
_WORDS = 2 + LONGEST
_COUNT_BITS = 32
"""Bits of a stamp that hold the count; the tag stands above them, in 30 bits."""


class Notices:
    """What this rank has laid out for each of so many ranks; see [Note: Notices]."""

    def __init__(self, num_ranks: int) -> None:
        self._words = (ctypes.c_int64 * (num_ranks * PLACES * _WORDS))()
        self._count: dict[tuple[int, int], int] = defaultdict(int)
        self._guard = threading.Lock()

    @property
    def address(self) -> int:
        """Where the board lies in this process."""
        return ctypes.addressof(self._words)

    def post(self, peer: int, tag: int, numbers: Sequence[int]) -> None:
        """Note what a peer was told under a tag, at most `LONGEST` numbers of it."""
        begin = _place(peer, tag)
        with self._guard:
            self._count[peer, tag] += 1
            count = self._count[peer, tag]
            self._words[begin] = 0
        if len(numbers) > LONGEST:
            return
        with self._guard:
            self._words[begin + 1 : begin + 2 + len(numbers)] = [len(numbers), *numbers]
        with self._guard:
            self._words[begin] = _stamp(tag, count)


def notice_of(pid: int, address: int, rank: int, tag: int, count: int) -> tuple[int, ...] | None:
    """What stands on a board for this rank, laid out under a tag for the count's time; None: nothing, or no more.

    Args:
        pid: of the process whose board it is. address: of the board there. rank: this one's.
    """
    place, stamp = address + _place(rank, tag) * WORD, _stamp(tag, count)
    try:
        found, length, *numbers = words_from(pid, place, _WORDS)
        if found != stamp or words_from(pid, place, 1) != (stamp,):
            return None
    except OSError:
        return None
    return tuple(numbers[:length])


def _place(rank: int, tag: int) -> int:
    return (rank * PLACES + tag % PLACES) * _WORDS


def _stamp(tag: int, count: int) -> int:
    return tag << _COUNT_BITS | count
