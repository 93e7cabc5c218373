"""Messages between ranks through rings in shared memory, and the heap of blocks behind them."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from harness.shm.segment import ALIGN, RING, Mailboxes, Peer, Segment, head_bytes
from tests.support.mutants import each_found_by


def mailboxes(size: int = 2) -> list[Mailboxes]:
    """Those of so many ranks, here in one process."""
    memories = [Segment(head_bytes(size), 1 << 23).memory for _ in range(size)]
    return [Mailboxes(rank, memories) for rank in range(size)]


def check_order() -> None:
    """Everything that is sent is received, once, in its order, by the rank it is for."""
    one, other, third = mailboxes(3)
    assert other.receive(0) == []
    one.send(1, [5, 6])
    one.send(1, [-7])
    assert third.receive(0) == one.receive(1) == []
    assert other.receive(0) == [[5, 6], [-7]]
    assert other.receive(0) == []
    sent, received, lengths = list[list[int]](), list[list[int]](), random.Random(0)
    for number in range(RING):  # several times around, and the end of the ring is met in all ways
        sent.append(list(range(number, number + lengths.randrange(13))))
        one.send(1, sent[-1])
        if number % 7 == 0:
            received += other.receive(0)
    received += other.receive(0)
    assert all(one == other for one, other in itertools.zip_longest(received, sent))


def check_a_full_ring() -> None:
    """There is room for what was read, and what was not is not lost."""
    one, other = mailboxes()
    for number in range(RING):
        one.send(1, [number, 0, 0])
    found = other.receive(0)
    assert len(found) == RING // 4
    while one.receive(1) == [] and (more := other.receive(0)):
        found += more
    assert found == [[number, 0, 0] for number in range(RING)]


class _Watched:
    """A ring at which `look` is called before each change."""

    def __init__(self, words: Any, look: Callable[[], None]) -> None:
        self.words, self.look = words, look

    def __setitem__(self, place: Any, value: Any) -> None:
        self.look()
        self.words[place] = value


def check_what_is_half_written() -> None:
    """Nothing is received of a message before it is whole."""
    one, other = mailboxes()
    received = list[list[int]]()
    one._own[1] = _Watched(one._own[1], lambda: received.extend(other.receive(0)))
    for number in range(RING // 4):
        one.send(1, [number, 2, 3, 4])
        assert len(received) == number, "it was received before it was sent"
    assert [*received, *other.receive(0)] == [[number, 2, 3, 4] for number in range(RING // 4)]


CHECKS = {"order": check_order, "full": check_a_full_ring, "whole": check_what_is_half_written}


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_sent_is_received(check: str) -> None:
    CHECKS[check]()


def test_a_message_that_is_too_long_for_a_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one message may have"):
        mailboxes()[0].send(1, range(RING))


test_a_mailbox_with_a_mistake_is_found = each_found_by(
    "Shared memory, by the mailboxes of ranks",
    r"""
    over the end: the reader does not learn that the ring begins anew
        shm.segment.Mailboxes.receive: _BEGIN + place % RING => _BEGIN + min(place, RING - 1)
    any room: what was not read yet is written over
        shm.segment.Mailboxes._flush: return => pass
    never read: what was read makes no room
        shm.segment.Mailboxes.receive: self._own[peer][_READ] = read => pass
    twice: a message is received twice
        shm.segment.Mailboxes.receive: self._read[peer] = read => pass
    counted first: a message is counted before it is written
        shm.segment.Mailboxes._flush: with self._order:\n            for
            => own[0] = end\n        with self._order:\n            for
    """,
    test_what_is_sent_is_received,
)


# -- the heap ----------------------------------------------------------------------------------------------------------


def test_blocks_never_overlap_and_are_used_again() -> None:
    segment, source, held = Segment(0, 1 << 24), random.Random(3), dict[int, torch.Tensor]()
    for number in range(1000):
        if held and source.random() < 0.5:
            del held[source.choice(list(held))]
            continue
        begin, block = segment.allocate(source.choice((0, 1, 100, 5000, 1 << 16)))
        assert begin % ALIGN == 0
        assert begin not in held
        assert segment.find(block) == begin
        held[begin] = block.fill_(number % 251)
        for first, other in itertools.pairwise(sorted(held)):
            assert first + held[first].nbytes <= other
    del block
    held.clear()
    gc.collect()
    reserved = segment._reserved
    segment.allocate(reserved - 1024)
    assert segment._reserved == reserved, "free blocks were not joined"


def test_more_than_there_is_is_refused_in_one_sentence() -> None:
    segment = Segment(0, 1 << 20)
    with pytest.raises(RuntimeError, match=r"no .* bytes of shared memory beyond .*: the segment has 1,048,576 bytes"):
        segment.allocate(1 << 21)
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(RuntimeError, match="No space left on device"):
        segment.allocate(4096)
    assert segment.allocate(4096)[1].numel() == 4096


def test_a_segment_is_ones_own_and_keeps_its_size() -> None:
    segment = Segment(0, 1 << 20)
    assert os.fstat(segment.file).st_mode & 0o777 == 0o600
    for size in (1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.file, size)


@pytest.mark.parametrize(("size", "inode"), [(1 << 21, 0), (1 << 20, 1)])
def test_another_file_is_not_mapped(size: int, inode: int) -> None:
    segment = Segment(0, 1 << 20)
    with pytest.raises(OSError, match="is of another file, of 1,048,576 bytes"):
        Peer(os.getpid(), segment.file, size, segment.inode + inode)


test_a_heap_with_a_mistake_is_found = each_found_by(
    "Shared memory, by its blocks",
    """
    almost enough: A block is taken from a gap that is a little too short
        shm.segment.Segment._find: if end - begin >= length) => if end - begin >= length - ALIGN)
    the rest of a gap: What a block leaves of a gap is never used again
        shm.segment.Segment._find: [(begin + length, end)] if end - begin > length else []
            => [(begin + length, end)] if end == sys.maxsize else []
    never joined: Blocks that were given back one after the other stay apart
        shm.segment.Segment._find: self._free[-1][1] == begin => False
    joined over a block: A gap is joined with the next one over a block that is in use
        shm.segment.Segment._find: bool(self._free) and self._free[-1][1] == begin => bool(self._free)
    anywhere: A block begins wherever the last one ends
        shm.segment.aligned: -(-num_bytes // ALIGN) * ALIGN => num_bytes
    given back in part: The begin of a block is given back, and the rest of it is lost
        shm.segment._give_back: begin + length => begin + ALIGN
    for others too: Other users of the host may read a segment
        shm.segment.Segment.__init__: 0o600 => 0o644
    any file: A descriptor that is another file's by now is mapped
        shm.segment.Peer.__init__: (found.st_size, found.st_ino) != (size, inode) => found.st_size != size
    grows: A segment's size may change while peers have mapped it
        shm.segment.Segment.__init__: | fcntl.F_SEAL_GROW =>
    """,
    test_blocks_never_overlap_and_are_used_again,
    test_a_segment_is_ones_own_and_keeps_its_size,
    test_another_file_is_not_mapped,
)
