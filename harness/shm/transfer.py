"""Collectives in flight: what a rank offers its peers, what it reads of theirs, and how it waits.

Every rank numbers the collectives of a group in the order in which it issues them, which is the same on all ranks. A
rank *offers* its part in one message to each peer: number, kind, bytes and where they lie. A reader *acknowledges*
when it has read. What lies in memory of `allocate` is offered in place, and its sender waits for acknowledgements; all
else is copied to a block of the segment first, which stays as long as it is not acknowledged.

Nothing runs in the background. Whoever waits, for whichever collective, also completes others that peers have offered,
in longer waits those of other groups too: so no rank waits for one that waits for it, if all issue the same. A waiting
rank looks again and again, with pauses of an eighth of the time it has waited, at most a millisecond.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from harness.shm.segment import Mailboxes, Peer, Segment, aligned, view

BLOCK = 1 << 16
"""Elements summed at a time, so that the running sum stays in cache."""


def sum_in_order(terms: Sequence[Tensor], out: Tensor, dtype: torch.dtype, *, block: int = BLOCK) -> None:
    """out = terms[0] + terms[1] + ..., added one by one in `dtype`; flat tensors of one length.

    One of the terms may lie where `out` does.
    """
    for begin in range(0, out.numel(), block):
        end = min(begin + block, out.numel())
        first, *others = (term[begin:end] for term in terms)
        into = out[begin:end]
        if not others and torch.promote_types(first.dtype, dtype) == dtype:
            if into.data_ptr() != first.data_ptr():
                into.copy_(first)
            continue
        if len(others) == 1 and first.dtype == others[0].dtype == into.dtype == dtype:
            torch.add(first, others[0], out=into)
            continue
        total = first.to(dtype, copy=True)
        for other in others:
            total.add_(other if torch.promote_types(other.dtype, dtype) == dtype else other.to(dtype))
        into.copy_(total)


GATHER, REDUCE = 1, 2
KINDS = {GATHER: "all-gather", REDUCE: "reduce-scatter"}
_ACKNOWLEDGE = -1
ByRank = Sequence[Sequence[Tensor]]
Take = Callable[[dict[int, list[Tensor]]], None]


@dataclass(eq=False)
class Work(dist.Work):
    """A collective through shared memory. It is made by whoever waits.

    like: by rank, tensors of the shapes and dtypes of what it has for this one. take: reads the parts of some peers;
    of a reduction those of all at once. missing: peers whose parts were not read. readers: peers that are waited for,
    as they read in place.
    """

    transport: Transport
    number: int
    kind: int
    like: ByRank
    take: Take
    missing: set[int]
    readers: set[int]

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def is_done(self) -> bool:
        """True if this rank has read all, and what it offered in place was read."""
        return not (self.missing or self.readers)

    def is_completed(self) -> bool:
        self.transport.advance(self)
        return self.is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are here and inputs may change. timeout: None: the group's. Raises RuntimeError: a
        peer has ended, a rank has given up the group, the limit is over, or peers issued another collective."""
        self.transport.wait_until(self.is_completed, lambda: self.missing | self.readers, timeout or None)
        return True


class Transport:
    """The collectives of one group.

    Args:
        rank: this one's.
        segment: its shared memory.
        peers: the others, by rank.
        limit: how long a wait may last; asked when one begins.
    """

    _all: ClassVar[WeakSet[Transport]] = WeakSet()

    def __init__(self, rank: int, segment: Segment, peers: dict[int, Peer], limit: Callable[[], timedelta]) -> None:
        self.rank, self.size, self.segment, self._peers = rank, len(peers) + 1, segment, peers
        # peers, each rank beginning with its next one, so that not all turn to one
        self._order = [(rank + step) % self.size for step in range(1, self.size)]
        self._mail = Mailboxes(
            rank, [peers[each].memory if each in peers else segment.memory for each in range(self.size)]
        )
        self._limit = limit
        self._number = 0
        self._guard = threading.RLock()
        self._open: dict[int, Work] = {}
        # messages about collectives that were not completed here, by number and peer
        self._offers: dict[tuple[int, int], list[int]] = {}
        # parts that this rank has offered, by number, and who has not read them
        self._unread: dict[int, tuple[object, set[int]]] = {}
        self._is_aborted = False
        self._all.add(self)

    def gather(self, own: Sequence[Tensor], outs: ByRank, *, until_settled: bool = False) -> Work:
        """Give `own` to all ranks, and get every rank's into `outs`. *Collective.*

        until_settled: `own` stays as it is until `settle`, so that nobody waits for its readers before.
        """
        for out, given in zip(outs[self.rank], own, strict=True):
            if out.data_ptr() != given.data_ptr():
                out.data.copy_(given)

        def take(parts: dict[int, list[Tensor]]) -> None:
            for peer, given in parts.items():
                for out, part in zip(outs[peer], given, strict=True):
                    out.data.copy_(part)

        return self._issue(GATHER, [own] * self.size, outs, take, until_settled=until_settled)

    def reduce_scatter(self, given: ByRank, outs: Sequence[Tensor], *, divisor: int = 1) -> Work:
        """Sum what all ranks give to this one, in rank order and in the dtype of `outs`, flat tensors. *Collective.*

        given: by rank, what this one gives to it. outs: may be this rank's own part of `given`. divisor: of the sums.
        """
        own = given[self.rank]

        def take(parts: dict[int, list[Tensor]]) -> None:
            for out, *terms in zip(outs, *(parts.get(rank, own) for rank in range(len(given))), strict=True):
                sum_in_order(terms, out.data, out.dtype, block=BLOCK)
                if divisor != 1:
                    out.data.div_(divisor)

        return self._issue(REDUCE, given, [own] * self.size, take)

    def _issue(self, kind: int, given: ByRank, like: ByRank, take: Take, *, until_settled: bool = False) -> Work:
        with self._guard:
            if self._is_aborted:
                raise RuntimeError("Connection closed: this process has given up the group")
            number, self._number = self._number, self._number + 1
            parts = {id(each): each for peer in self._order for each in given[peer] if each.numel()}
            places = {key: self.segment.find(each) for key, each in parts.items()}
            kept: object = given
            unread, in_place = set(self._order), None not in places.values()
            if not in_place:
                begin, block = self.segment.allocate(sum(aligned(each.nbytes) for each in parts.values()))
                kept, place = block, 0
                for key, each in parts.items():
                    block[place : place + each.nbytes].view(each.dtype).view(each.shape).copy_(each.detach())
                    places[key], place = begin + place, place + aligned(each.nbytes)
            self._unread[number] = kept, unread
            is_awaited = kind == REDUCE or (in_place and not until_settled)
            work = Work(self, number, kind, like, take, set(self._order), unread if is_awaited else set())
            self._open[number] = work
            for peer in self._order:
                length = sum([tensor.nbytes for tensor in given[peer]])
                self._mail.send(peer, [number, kind, length, *(places.get(id(each)) or 0 for each in given[peer])])
        self._advance_ready(REDUCE)
        return work

    def _receive(self) -> None:
        for peer in self._order:
            for number, *rest in self._mail.receive(peer):
                if number == _ACKNOWLEDGE:
                    _, unread = self._unread[rest[0]]
                    unread.discard(peer)
                    if not unread:
                        del self._unread[rest[0]]
                else:
                    self._offers[number, peer] = rest

    def _advance(self, work: Work) -> None:
        here = [peer for peer in self._order if peer in work.missing and (work.number, peer) in self._offers]
        if here and (work.kind == GATHER or len(here) == len(work.missing)):
            work.take({peer: self._parts(work, peer) for peer in here})
            for peer in here:
                del self._offers[work.number, peer]
                work.missing.discard(peer)
                self._mail.send(peer, [_ACKNOWLEDGE, work.number])
        if work.is_done:
            self._open.pop(work.number, None)

    def _parts(self, work: Work, peer: int) -> list[Tensor]:
        """A peer's parts, where they lie. Raises RuntimeError: the peer offers something else."""
        kind, length, *places = self._offers[work.number, peer]
        expected = work.like[peer]
        wanted = sum([each.nbytes for each in expected])
        if (kind, length) != (work.kind, wanted):
            raise RuntimeError(
                f"ranks issue different collectives as number {work.number}: here {KINDS[work.kind]} of"
                f" {wanted:,} bytes from {self._named(peer)}, there {KINDS.get(kind, 'another')} of {length:,} bytes"
            )
        memory = self._peers[peer].memory
        found = list(zip(places, expected, strict=True))
        if any(not 0 <= place <= len(memory) - each.nbytes for place, each in found):
            raise RuntimeError(f"{self._named(peer)} offers bytes beyond its segment")
        return [view(memory, place, each) for place, each in found]

    def _advance_ready(self, kind: int | None = None) -> None:
        """Complete what peers have offered, of one kind or all, without waiting."""
        with self._guard:
            self._receive()
            for work in () if self._is_aborted else list(self._open.values()):
                if kind in (None, work.kind):
                    self._advance(work)

    def advance(self, work: Work) -> None:
        if work.number in self._open:
            with self._guard:
                self._receive()
                self._advance(work)

    def settle(self) -> None:
        """Wait until peers have read what this rank copied, or keeps, for collectives that are complete here. Raises
        RuntimeError: as `Work.wait`."""

        def readers() -> set[int]:
            with self._guard:
                self._receive()
                return set().union(*(peers for number, (_, peers) in self._unread.items() if number not in self._open))

        self.wait_until(lambda: not readers(), readers, None)

    def wait_until(self, is_over: Callable[[], bool], awaited: Callable[[], set[int]], limit: timedelta | None) -> None:
        """Wait for these peers, and complete meanwhile what others offer; raises as `Work.wait`."""
        began = looked = time.monotonic()
        while not is_over():
            self._advance_ready()
            now = time.monotonic()
            if now - looked > 0.02:  # look every 20 ms for what else may end the wait
                looked = now
                for each in list(self._all):
                    with suppress(RuntimeError):  # who waits there raises it
                        each._advance_ready()
                peers = awaited()
                if (gone := self._gone(peers)) and not is_over():
                    raise RuntimeError(gone)
                if now - began > (limit or self._limit()).total_seconds():
                    names = " and ".join(self._named(peer) for peer in sorted(peers))
                    raise RuntimeError(f"Timed out waiting {now - began:.1f} s for {names}")
            time.sleep(min(max((now - began) / 8, 20e-6), 1e-3))

    def _gone(self, peers: set[int]) -> str:
        """Why nothing more will come from some peer; "" where it may."""
        for peer in sorted(peers):
            name = self._named(peer)
            if self._is_aborted:
                return f"Connection closed: this process has given up the group in which it waits for {name}"
            if self._mail.is_closed(peer):
                return f"Connection closed: {name} has given the group up"
            if not self._peers[peer].lives():
                return f"Connection closed: {name} cannot be read any more: it has ended unless its log says otherwise"
        return ""

    def _named(self, rank: int) -> str:
        return f"rank {rank} of the group (process {self._peers[rank].pid})"

    def abort(self) -> None:
        """End all waits in this group with an error, here and at peers that wait for this rank."""
        self._is_aborted = True
        self._mail.close()
