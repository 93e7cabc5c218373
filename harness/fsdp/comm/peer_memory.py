"""Reading what another rank of this host holds, straight from its memory.

[Note: Reads instead of messages] Between ranks of one host a message through a socket is copied twice by the kernel and
costs both ranks a core. Linux lets a process read another one's memory with a single copy (`process_vm_readv`, also
called cross memory attach; MPI libraries and UCX do so). A sender then only says where its data lies, and each reader
fetches it to where it is wanted: a gather into its place, a contribution into a block that stays in cache while it is
summed. The sender is told when it may have its memory back. What says so are small messages, so that a rank that dies
or never comes is noticed as in any collective. What is summed, and in which order, is the same.

[Note: Taken] Some of what is laid out are copies, made to be read. A receipt does not tell when they may go: of gloo's
messages one cannot ask whether they are here, only wait. So each rank counts on a board what it has read of each other
one, and these look at it. They need not see the last count, and do not fail where a board is gone. On another board
stands what each rank has laid out, beside the message that tells so (see [Note: Notices]): who looks there knows
whether reading would wait, and need not wait for the message, which takes half a millisecond where cores are busy.

A system may forbid it: another user, another PID namespace, seccomp, Yama. All ranks of a group try once, with the
memory they will read from, and agree; where one fails, all use messages. Yama's restriction to descendants is met by
naming the launcher (the parent process), whose descendants may then read this process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm import cross_memory, events
from harness.fsdp.comm.cross_memory import WORD, copy_from, words_from
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.notices import Notices, notice_of

PR_SET_PTRACER = 0x59616D61
CANARY = 0x5EEDED_FACE5


class PeerMemory:
    """The ranks of one group, all on this host and all readable.

    Args:
        rank: this one's.
        pids: process id of each group rank.
        board: int64, shape [ranks]: of each rank's layings, how many were read here with none before them unread.
        boards: address of each rank's board.
        notices: what is laid out here. notices_at: address of each rank's.
    """

    def __init__(
        self,
        rank: int,
        pids: list[int],
        board: Tensor,
        boards: list[int],
        notices: Notices,
        notices_at: list[int],
    ) -> None:
        self.rank = rank
        self.pids = pids
        self.bytes_read = 0
        self._board = board
        self._boards = boards
        self.notices = notices
        self._notices_at = notices_at
        self._awaited: dict[tuple[int, int], int] = defaultdict(int)
        """How often something was to be read here, by peer and tag."""
        self._passed_over: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}
        """Messages that nobody waited for, with the memory they come into, by peer and tag."""
        self._laid = [0] * len(pids)
        self._read: list[set[int]] = [set() for _ in pids]
        """Numbers, by rank that laid out, of what was read here while something earlier was not."""
        self._guard = threading.Lock()

    def next_number(self, peer: int) -> int:
        """Number of what is laid out next for a peer."""
        with self._guard:
            self._laid[peer] += 1
            return self._laid[peer] - 1

    def note_read(self, peer: int, number: int) -> None:
        """All of what a peer laid out under a number is read."""
        with self._guard:
            read, count = self._read[peer], int(self._board[peer])
            read.add(number)
            while count in read:
                read.remove(count)
                count += 1
            self._board[peer] = count

    def is_read(self, peer: int, number: int) -> bool:
        """Whether a peer is known to have read all that was laid out for it under a number; see [Note: Taken]."""
        try:
            (count,) = words_from(self.pids[peer], self._boards[peer] + self.rank * WORD, 1)
        except OSError:
            return False
        return count > number

    def next_count(self, peer: int, tag: int) -> int:
        """How often something was to be read from a peer under a tag, this time counted."""
        with self._guard:
            self._awaited[peer, tag] += 1
            return self._awaited[peer, tag]

    def notice(self, peer: int, tag: int, count: int) -> tuple[int, ...] | None:
        """What a peer has on its board of what it laid out here under a tag for the count's time; None: not there."""
        return notice_of(self.pids[peer], self._notices_at[peer], self.rank, tag, count)

    def pass_over(self, peer: int, tag: int, message: Any, into: Tensor) -> None:
        """Nobody waits for a message whose contents are known already, until `collect`."""
        with self._guard:
            self._passed_over.setdefault((peer, tag), []).append((message, into))

    def collect(self, peer: int, tag: int) -> None:
        """Wait for the messages under a tag that nobody has waited for: they were sent before their notice stood."""
        with self._guard:
            messages = self._passed_over.pop((peer, tag), ())
        for message, _ in messages:
            events.wait_for(message)

    def collect_all(self) -> None:
        """As `collect`, of every peer and tag."""
        for peer, tag in list(self._passed_over):
            self.collect(peer, tag)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Copy `into.nbytes` bytes at `address` of a group rank's memory over a contiguous CPU tensor.

        Raises:
            RuntimeError: the system refuses, or the rank has died.
        """
        try:
            copy_from(self.pids[rank], address, into.data_ptr(), into.nbytes)
        except OSError as error:
            where = f"rank {rank} of the group (process {self.pids[rank]})"
            raise RuntimeError(
                f"{where} cannot be read any more: {error.strerror}; it has ended unless its log says otherwise"
            ) from error
        self.bytes_read += into.nbytes


def meet(group: dist.ProcessGroup, rank: int, size: int) -> tuple[PeerMemory | None, str]:
    """Find out whether all ranks of a group can read each other. *Collective.*

    Returns the group's memory and "", or None and the reason, the same on all ranks.
    """
    canary, board = torch.tensor([CANARY + rank]), torch.zeros(size, dtype=torch.int64)
    notices = Notices(size)
    boards = [board.data_ptr(), notices.address]
    mine = torch.tensor([_host(), os.getpid(), canary.data_ptr(), int(cross_memory.is_there()), *boards])
    everyone = torch.empty(size, mine.numel(), dtype=torch.int64)
    with events.begin(Label("all_gather", "peer memory")):
        group.allgather([list(everyone)], [mine]).wait()
    failed = torch.tensor([0])
    if int(everyone[:, 3].min()) and bool((everyone[:, 0] == everyone[0, 0]).all()):
        _let_siblings_read()
        with events.begin(Label("all_reduce", "peer memory")):  # nobody reads before everybody may be read
            group.allreduce([torch.zeros(1)]).wait()
        failed[0] = _first_failure(everyone, rank)
    else:
        failed[0] = _ELSEWHERE
    with events.begin(Label("all_reduce", "peer memory")):
        group.allreduce([failed], dist.ReduceOp.MAX).wait()
    if reason := int(failed[0]):
        return None, _reason(reason)
    pids, boards_at, notices_at = (everyone[:, column].tolist() for column in (1, 4, 5))
    return PeerMemory(rank, pids, board, boards_at, notices, notices_at), ""


RECEIPT = 1 << 30
"""Added to the tag of a message for the one that answers it."""


class Offer(NamedTuple):
    """What is laid out for a peer. works: done when it has read all of it. number: under which it is laid out."""

    peer: int
    number: int
    works: list[Any]


def lay_out(group: dist.ProcessGroup, memory: PeerMemory, tensors: Sequence[Tensor], peer: int, tag: int) -> Offer:
    """Tell a peer where contiguous tensors lie that are meant for it.

    The tensors stay where they are until it has read them. Their bytes count as sent, the messages about them do not.
    """
    events.offer(sum(tensor.nbytes for tensor in tensors))
    number = memory.next_number(peer)
    laid = [number, *[tensor.data_ptr() for tensor in tensors]]
    told = torch.tensor(laid)
    receipt = torch.empty(1, dtype=torch.uint8)
    with events.resume(events.CONTROL):
        works = [group.send([told], peer, tag), group.recv([receipt], peer, tag + RECEIPT)]
    memory.notices.post(peer, tag, laid)
    return Offer(peer, number, works)


class Laid:
    """What a peer has laid out for this rank.

    Args:
        num_tensors: how many it lays out. tag: under which it tells so.
    """

    def __init__(self, group: dist.ProcessGroup, memory: PeerMemory, peer: int, num_tensors: int, tag: int) -> None:
        self.group = group
        self.memory = memory
        self.peer = peer
        self._tag = tag
        memory.collect(peer, tag)
        self._told = torch.empty(1 + num_tensors, dtype=torch.int64)
        self._work: Any = group.recv([self._told], peer, tag)
        self._count = memory.next_count(peer, tag)
        self._number = 0
        self._addresses: list[int] = []

    def is_there(self) -> bool:
        """Whether the peer is known to have told, so that reading waits for nobody."""
        if self._work is None:
            return True
        laid = self.memory.notice(self.peer, self._tag, self._count)
        if laid is None:
            return False
        self.memory.pass_over(self.peer, self._tag, self._work, self._told)
        (self._number, *self._addresses), self._work = laid, None
        return True

    def _listen(self) -> None:
        """Wait for the peer to tell, unless it has."""
        if not self.is_there():
            events.wait_for(self._work)
            (self._number, *self._addresses), self._work = self._told.tolist(), None

    def read(self, index: int, into: Tensor, offset: int = 0) -> None:
        """Copy from `offset` bytes on of the tensor at `index` over a contiguous tensor; waits for the peer to tell."""
        self._listen()
        if into.numel():
            self.memory.read(self.peer, self._addresses[index] + offset, into)

    def finish(self) -> None:
        """Tell the peer that all is read."""
        self._listen()
        self.memory.note_read(self.peer, self._number)
        with events.resume(events.CONTROL):
            events.wait_for(self.group.send([torch.zeros(1, dtype=torch.uint8)], self.peer, self._tag + RECEIPT))


_ELSEWHERE = 1 << 20
_DIFFERS = _ELSEWHERE + 1


def _reason(code: int) -> str:
    if code == _ELSEWHERE:
        return "the ranks are on several hosts or in several PID namespaces, or the system has no process_vm_readv"
    if code == _DIFFERS:
        return "process_vm_readv gave other bytes than the rank holds"
    return f"process_vm_readv: {os.strerror(code)}"


def _first_failure(everyone: Tensor, rank: int) -> int:
    """0 if this rank can read the canaries of all others, else an errno or `_DIFFERS`."""
    for peer, (_, pid, address, *_) in enumerate(everyone.tolist()):
        if peer != rank:
            try:
                (seen,) = words_from(pid, address, 1)
            except OSError as failure:
                return failure.errno or _DIFFERS
            if seen != CANARY + peer:
                return _DIFFERS
    return 0


def _host() -> int:
    """A number that two processes share if one can name the other by its process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = socket.gethostname(), ""
    return zlib.crc32(f"{boot} {namespace}".encode())


def _let_siblings_read() -> None:
    """Under Yama, allow the parent's descendants; fails harmlessly on a kernel without it."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
