"""Reading what another rank of this host holds, straight from its memory.

[Note: Reads instead of messages] Between ranks of one host a message through a socket is copied twice by the kernel and
costs both ranks a core. Linux lets a process read another one's memory with a single copy (`process_vm_readv`, also
called cross memory attach; MPI libraries and UCX do so). A sender then only says where its data lies, and each reader
fetches it to where it is wanted: a gather into its place, a contribution into a block that stays in cache while it is
summed. The sender is told when it may have its memory back. What is summed, and in which order, is the same.

[Note: Taken] What says where data lies, and that it was read, are notices ([Note: Notices]), which ask nothing of the
system. Each laying has a number, and who has read all of it tells so: whoever waits for that may free or change it.
Whether a notice is here can be asked without waiting: so copies that were made to be read go as soon as all have them,
and sums are made early where reading waits for nobody.

[Note: Waiting for notices] Who waits for one looks again and again, with pauses that grow with the wait: an eighth of
it, at most a millisecond. A rank that has ended is found by the kernel, which knows no such process any more; what it
told before is heard. A watchdog's verdict ends the wait, and so does a rank that gives the group up (as closed
connections would), and the group's own limit.

[Note: Last reads] A program may end as soon as it has all it needs, while others still read what it has laid out, as of
the last update. Its end waits for them a little: where it ends by itself, and also in a process of multiprocessing.

A system may forbid it: another user, another PID namespace, seccomp, Yama. All ranks of a group try once, with the
memory they will read from, and agree; where one fails, all use messages. Yama's restriction to descendants is met by
naming the launcher (the parent process), whose descendants may then read this process.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm import cross_memory, events, notices
from harness.fsdp.comm.cross_memory import copy_from, words_from
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.notices import Notices

PR_SET_PTRACER = 0x59616D61
CANARY = 0x5EEDED_FACE5
LOOK_S = 0.02
"""Seconds between two looks for what else may end a wait."""
PAUSES_S = 20e-6, 1e-3
"""Seconds between two looks for a notice, at least and at most."""
EXIT_S = 2.0
"""Seconds that the program's end waits for readers."""
_READ = -1


_living: weakref.WeakSet[PeerMemory] = weakref.WeakSet()
_ends_by_multiprocessing: set[int] = set()


@atexit.register
def _wait_for_last_reads() -> None:
    """The program ends; see [Note: Last reads]. One that has failed is in nobody's way: others wait for what it was to
    do."""
    until = time.monotonic() + (0.0 if hasattr(sys, "last_value") else EXIT_S)
    for memory in list(_living):
        if memory.pids[memory.rank] == os.getpid():  # and not a process forked from it
            memory.wait_for_readers(until)


class PeerMemory:
    """The ranks of one group, all on this host and all readable.

    Args:
        group: them; its limit is that of every wait.
        rank: this one's.
        pids: process id of each group rank.
        canary: what the others read of this process to see whether they can, shape [1], int64.
        canaries: address of each rank's.
        notices: what ranks tell each other; see [Note: Taken].
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        pids: list[int],
        canary: Tensor,
        canaries: list[int],
        board: Notices,
    ) -> None:
        self.group = group
        self.rank = rank
        self.pids = pids
        self.bytes_read = 0
        self._canary = canary
        self._canaries = canaries
        self._notices = board
        self._awaited: dict[tuple[int, int], int] = defaultdict(int)
        self._came: dict[tuple[int, int], int] = defaultdict(int)
        self._told: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        """Number and addresses of what was laid out here, by peer, tag and which time it was, until it is asked for."""
        self._laid = [0] * len(pids)
        self._read = [0] * len(pids)
        self._read_beyond: list[set[int]] = [set() for _ in pids]
        self._is_given_up = False
        self._guard = threading.Lock()
        events.on_give_up(group, self._give_up)
        _living.add(self)
        if multiprocessing.parent_process() is not None and os.getpid() not in _ends_by_multiprocessing:
            _ends_by_multiprocessing.add(os.getpid())
            multiprocessing.util.Finalize(None, _wait_for_last_reads, exitpriority=0)

    # -- what is told --------------------------------------------------------------------------------------------------

    def lay_out(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Receipt:
        """Tell a peer where contiguous tensors lie that are meant for it.

        The tensors stay where they are until it has read them. Their bytes count as sent, the notices about them do
        not.
        """
        events.offer(sum([tensor.nbytes for tensor in tensors]))
        addresses = [tensor.data_ptr() for tensor in tensors]
        with self._guard:
            number = self._laid[peer]
            self._laid[peer] += 1
            is_told = self._notices.tell(peer, [tag, number, *addresses])
        if not is_told:
            self._tell_late(peer, [tag, number, *addresses])
        return Receipt(self, peer, number)

    def note_read(self, peer: int, number: int) -> None:
        with self._guard:
            is_told = self._notices.tell(peer, [_READ, number])
        if not is_told:
            self._tell_late(peer, [_READ, number])

    def _tell_late(self, peer: int, numbers: list[int]) -> None:
        def is_told() -> bool:
            with self._guard:
                return self._notices.tell(peer, numbers)

        self.wait(peer, is_told)

    def _hear(self, peer: int) -> None:
        if not self._notices.has_news(peer):
            return
        with self._guard:
            for tag, number, *addresses in self._notices.hear(peer):
                if tag == _READ:
                    self._note_taken(peer, number)
                else:
                    self._came[peer, tag] += 1
                    self._told[peer, tag, self._came[peer, tag]] = number, addresses

    def _note_taken(self, peer: int, number: int) -> None:
        beyond, count = self._read_beyond[peer], self._read[peer]
        beyond.add(number)
        while count in beyond:
            beyond.remove(count)
            count += 1
        self._read[peer] = count

    def is_taken(self, peer: int, number: int) -> bool:
        """True if a peer has told that it has read all that was laid out for it under a number; see [Note: Taken]."""
        self._hear(peer)
        return number < self._read[peer] or number in self._read_beyond[peer]

    def next_count(self, peer: int, tag: int) -> int:
        """How often something was to be read from a peer under a tag, this time counted."""
        with self._guard:
            self._awaited[peer, tag] += 1
            return self._awaited[peer, tag]

    def told_by(self, peer: int, tag: int, count: int) -> tuple[int, list[int]] | None:
        """Number and addresses of what a peer has laid out here under a tag for the count's time, handed over once;
        None: it has not yet."""
        self._hear(peer)
        return self._told.pop((peer, tag, count), None)

    def wait(self, peer: int, is_over: Callable[[], bool], limit: timedelta | None = None) -> None:
        """Wait for what a peer is to tell; see [Note: Waiting for notices]. limit: None: the group's.

        Raises:
            RuntimeError: the peer has ended, the group was given up, or the limit is over.
            CollectiveError: a watchdog found that it will not come about.
        """
        if is_over():
            return
        began = looked = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                for each in range(len(self.pids)):
                    if each != self.rank:
                        self._hear(each)  # which may wait for room to tell more
                events.check()
                gone = self._gone(peer)
                if gone and not is_over():
                    raise RuntimeError(gone)
                if now - began > (limit or _limit_of(self.group)).total_seconds():
                    raise RuntimeError(f"Timed out waiting {now - began:.1f} s for {self._named(peer)}")
            shortest, longest = PAUSES_S
            time.sleep(min(max((now - began) / 8, shortest), longest))

    def wait_for_readers(self, until: float) -> None:
        """Wait until others have read all that was laid out for them, or will not, or the clock is at `until`."""
        for peer in range(len(self.pids)):
            while peer != self.rank and time.monotonic() < until:
                self._hear(peer)
                if self._read[peer] == self._laid[peer] or self._gone(peer):
                    break
                time.sleep(PAUSES_S[1])

    def _give_up(self) -> None:
        self._is_given_up = True
        self._notices.end()

    def _gone(self, peer: int) -> str:
        if self._is_given_up:
            return f"Connection closed: this process has given up the group in which it waits for {self._named(peer)}"
        if self._notices.has_ended(peer):
            return f"Connection closed: {self._named(peer)} has given the group up"
        try:
            words_from(self.pids[peer], self._canaries[peer], 1)
        except ProcessLookupError as error:
            return self._ended(peer, str(error.strerror))
        except OSError:  # it lives, and has dropped its model
            return ""
        return ""

    def _named(self, rank: int) -> str:
        return f"rank {rank} of the group (process {self.pids[rank]})"

    def _ended(self, rank: int, reason: str) -> str:
        return (
            f"Connection closed: {self._named(rank)} cannot be read any more: {reason}; it has ended unless its log"
            " says otherwise"
        )

    # -- what is read --------------------------------------------------------------------------------------------------

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Copy `into.nbytes` bytes at `address` of a group rank's memory over a contiguous CPU tensor.

        Raises:
            RuntimeError: the system refuses, or the rank has died.
        """
        try:
            copy_from(self.pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            raise RuntimeError(self._ended(rank, str(error.strerror))) from error
        self.bytes_read += into.nbytes


class Receipt:
    """A peer's word that it has read what was laid out for it under a number."""

    __slots__ = ("_memory", "_number", "_peer")

    def __init__(self, memory: PeerMemory, peer: int, number: int) -> None:
        self._memory = memory
        self._peer = peer
        self._number = number

    def is_here(self) -> bool:
        return self._memory.is_taken(self._peer, self._number)

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until the peer has read it; raises as `PeerMemory.wait` does."""
        self._memory.wait(self._peer, self.is_here, limit)


class Laid:
    """Buffers that a peer publishes for this rank.

    Args:
        tag: under which it tells so: of one tag, what is made first is what it lays out first.
    """

    def __init__(self, memory: PeerMemory, peer: int, tag: int) -> None:
        self.memory = memory
        self.peer = peer
        self._tag = tag
        self._count = memory.next_count(peer, tag)
        self._told: tuple[int, list[int]] | None = None

    def is_there(self) -> bool:
        """True if the peer has told, so that reading waits for nobody."""
        if self._told is None:
            self._told = self.memory.told_by(self.peer, self._tag, self._count)
        return self._told is not None

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the peer to tell; raises as `PeerMemory.wait` does."""
        self.memory.wait(self.peer, self.is_there, limit)

    def _listen(self) -> tuple[int, list[int]]:
        if self._told is None:
            events.wait_for(self)
        assert self._told is not None
        return self._told

    def read(self, index: int, into: Tensor, offset: int = 0) -> None:
        """Copy from `offset` bytes on of the tensor at `index` over a contiguous tensor; waits for the peer to tell."""
        _, addresses = self._listen()
        if into.numel():
            self.memory.read(self.peer, addresses[index] + offset, into)

    def finish(self) -> None:
        number, _ = self._listen()
        self.memory.note_read(self.peer, number)


def meet(group: dist.ProcessGroup, rank: int, size: int) -> tuple[PeerMemory | None, str]:
    """Find out whether all ranks of a group can read each other. *Collective.*

    Returns the group's memory and "", or None and the reason, the same on all ranks.
    """
    canary, board = torch.tensor([CANARY + rank]), _board(rank, size)
    can = cross_memory.is_there() and board is not None
    mine = torch.tensor([_host(), os.getpid(), canary.data_ptr(), int(can), -1 if board is None else board.file])
    everyone = torch.empty(size, mine.numel(), dtype=torch.int64)
    with events.begin(Label("all_gather", "peer memory")):
        group.allgather([list(everyone)], [mine]).wait()
    failed = torch.tensor([0])
    if board is not None and int(everyone[:, 3].min()) and bool((everyone[:, 0] == everyone[0, 0]).all()):
        _let_siblings_read()
        with events.begin(Label("all_reduce", "peer memory")):  # nobody reads before everybody may be read
            group.allreduce([torch.zeros(1)]).wait()
        failed[0] = _first_failure(everyone, board)
    else:
        failed[0] = _ELSEWHERE
    with events.begin(Label("all_reduce", "peer memory")):
        group.allreduce([failed], dist.ReduceOp.MAX).wait()
    if board is not None:
        board.close_file()
    if board is None or int(failed[0]):
        return None, _reason(int(failed[0]))
    pids, canaries = (everyone[:, column].tolist() for column in (1, 2))
    return PeerMemory(group, rank, pids, canary, canaries, board), ""


def _board(rank: int, size: int) -> Notices | None:
    """Mailbox for messages to others; None where the system has no such."""
    try:
        return Notices(rank, size) if notices.is_there() else None
    except OSError:
        return None


def _limit_of(group: dist.ProcessGroup) -> timedelta:
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


_ELSEWHERE = 1 << 20
_DIFFERS = _ELSEWHERE + 1


def _reason(code: int) -> str:
    if code == _ELSEWHERE:
        return (
            "the ranks are on several hosts or in several PID namespaces, or the system has no process_vm_readv or no"
            " memfd_create"
        )
    if code == _DIFFERS:
        return "process_vm_readv gave other bytes than the rank holds"
    return f"process_vm_readv: {os.strerror(code)}"


def _first_failure(everyone: Tensor, board: Notices) -> int:
    """0 if this rank can read the canaries and map the boards of all others, else an errno or `_DIFFERS`."""
    for peer, (_, pid, address, _, file) in enumerate(everyone.tolist()):
        if peer != board.rank:
            try:
                (seen,) = words_from(pid, address, 1)
                board.join(peer, pid, file)
            except OSError as failure:
                return failure.errno or _DIFFERS
            if seen != CANARY + peer:
                return _DIFFERS
    return 0


def _host() -> int:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = socket.gethostname(), ""
    return zlib.crc32(f"{boot} {namespace}".encode())


def _let_siblings_read() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
