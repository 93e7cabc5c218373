"""One process group of the engine: gathers, messages, and which of its ranks can be read directly."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.parts import Evened, Part, packed, unpack, worth_packing
from harness.fsdp.comm.peer_memory import Laid, PeerMemory, meet
from harness.fsdp.options import Options


def _has_spare_cores(num_ranks: int) -> bool:
    """True if this host has a core for each rank beyond those its ranks compute with.

    [Note: Spare cores] Reading and summing are done by cores. Where each of them computes already, a thread that reads
    or sums beside the backward hides nothing and disturbs it: then that work is done when its result is wanted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores >= num_ranks * (torch.get_num_threads() + 1)


_COMMUNICATORS: dict[str, Iterator[int]] = {}
"""Numbers the models of each group in order of construction, which is the same on all its ranks."""


class Communicator:
    """One process group: its ranks, its backend, and all-gather as that backend does it best.

    Args:
        group: process group; None is the default one.
        runtime: streams of the device the buckets live on.
        eager_limit: on gloo, bytes a peer from which on ranks of one host read each other's memory instead of sending;
            None always sends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        runtime: DeviceRuntime,
        eager_limit: int | None = Options.eager_limit_bytes,
    ) -> None:
        resolved = group if group is not None else dist.group.WORLD
        if resolved is None:
            raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        self.group: dist.ProcessGroup = resolved
        self.runtime = runtime
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.by_peers = self.group._get_backend(runtime.device).name() == "gloo"
        self.eager_limit = eager_limit
        self.memory: PeerMemory | None = None
        self.why_messages = "one rank" if self.size == 1 else "no eager limit is set"
        if self.by_peers and runtime.device.type == "cpu" and eager_limit is not None and self.size > 1:
            self.memory, self.why_messages = meet(self.group, self.rank, self.size)
        self.threads_help = self.memory is None or _has_spare_cores(self.size)
        self._reader: ThreadPoolExecutor | None = None
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._index = next(_COMMUNICATORS.setdefault(self.group.group_name, count()))

    def transport(self) -> dict[str, str]:
        """How data moves: "reads" or "messages" and why; and whether threads read and sum beside the backward."""
        if not self.by_peers:
            return {"transport": self.group._get_backend(self.runtime.device).name()}
        if self.memory is None:
            return {"transport": "messages", "why": self.why_messages}
        return {"transport": "reads", "beside_compute": "yes" if self.threads_help else "no spare cores"}

    @property
    def goes_on_alone(self) -> bool:
        """True if a collective that all ranks have issued ends whatever they do next. On gloo a rank may wait until
        another one takes what it has laid out."""
        return not self.by_peers

    def tag(self, label: Label) -> int:
        """Message tag of a collective made of sends: one per model, kind and bucket; the same on all ranks."""
        return zlib.crc32(f"{self._index}/{label.kind}/{label.bucket}".encode()) >> 2

    def all_gather(self, parts: Sequence[Part], label: Label, *, ahead: bool = False) -> Pending:
        """Fill every rank's chunk of each part from that rank; this rank's own chunk must hold its data already.

        The parts belong to the returned handle until it is waited for. `ahead`: the caller computes before it waits, so
        that what only this process can do is worth a thread.
        """
        if self.size == 1:
            return Pending([])
        with events.begin(label, parts):
            return self._gather(parts, self.tag(label), ahead=ahead)

    def second_leg(self, parts: Sequence[Part], label: Label) -> Pending:
        """An all-gather that is part of a collective announced before; callable from any thread."""
        if self.size == 1:
            return Pending([])
        with events.resume(label):
            return self._gather(parts, self.tag(label), ahead=False)

    def _gather(self, parts: Sequence[Part], tag: int, *, ahead: bool) -> Pending:
        if not self.by_peers:
            return self._gather_natively(parts)
        if self.reads(parts):
            return self._gather_by_reads(parts, tag, ahead=ahead)
        if not worth_packing(parts):
            return self._gather_by_messages(parts, tag)
        whole = packed(parts, [self.rank])
        pending = self._gather_by_messages([whole], tag)
        pending.keeps, pending.finish = [whole, parts], lambda: unpack(whole, parts, self.others)
        return pending

    def _gather_natively(self, parts: Sequence[Part]) -> Pending:
        evened = Evened.all_of(parts)
        if evened is None:
            chunks = [[part.chunk(rank) for rank in range(self.size)] for part in parts]
            return Pending([self.group.allgather([each], [each[self.rank]]) for each in chunks], parts)
        for each in evened:
            each.copy_in(self.rank)
        outputs = [each.part.tensor for each in evened]
        inputs = [each.part.chunk(self.rank) for each in evened]
        work = self.group.allgather_into_tensor_coalesced(outputs, inputs)
        return Pending([work], parts, finish=partial(_copy_back, evened) if any(e.is_copy for e in evened) else None)

    def reads(self, parts: Sequence[Part]) -> bool:
        """True if peers read what these parts hold for them; the same on all ranks."""
        if self.memory is None or self.eager_limit is None:
            return False
        return sum([part.longest for part in parts]) > self.eager_limit

    def reads_when_wanted(self, num_bytes: int) -> bool:
        """True if a gather to which every rank gives so many bytes is best made in two halves, by `lay_out`."""
        if self.memory is None or self.eager_limit is None or self.threads_help:
            return False
        return num_bytes > self.eager_limit

    def lay_out(self, own: Sequence[Tensor], label: Label) -> tuple[Pending, list[Laid]]:
        """Begin an all-gather with this rank's part alone: what it gives, and what the others lay out for it."""
        with events.begin(label):
            return self._lay_out(own, self.tag(label))

    def _lay_out(self, own: Sequence[Tensor], tag: int) -> tuple[Pending, list[Laid]]:
        offers = self.offer([(peer, own) for peer in self.others], tag)
        laid = [self.laid_by(peer, tag) for peer in self.others]
        return offers, laid

    def offer(self, wanted: Sequence[tuple[int, Sequence[Tensor]]], tag: int) -> Pending:
        """Lay out tensors for peers, each with its own, to be read under a tag."""
        memory = self.peer_memory
        receipts = [memory.lay_out(tensors, peer, tag) for peer, tensors in wanted]
        return Pending(
            [],
            keeps=[tensors for _, tensors in wanted],
            outgoing=receipts,
            is_taken=lambda: all(receipt.is_here() for receipt in receipts),
        )

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank beginning with its next one, so that not all turn to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _gather_by_reads(self, parts: Sequence[Part], tag: int, *, ahead: bool) -> Pending:
        pending, laid = self._lay_out([part.chunk(self.rank) for part in parts], tag)
        reads = _Reads(laid, parts)
        if ahead and self.threads_help:
            self._ahead().submit(reads.wait)
        pending.incoming, pending.keeps = [reads], parts
        return pending

    def _ahead(self) -> ThreadPoolExecutor:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="fsdp-gather")
        return self._reader

    def laid_by(self, peer: int, tag: int) -> Laid:
        return Laid(self.peer_memory, peer, tag)

    @property
    def peer_memory(self) -> PeerMemory:
        """Memory of this group's ranks.

        Raises:
            RuntimeError: they cannot read each other.
        """
        if self.memory is None:
            raise RuntimeError("the ranks of this group cannot read each other")
        return self.memory

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=True)

    def _gather_by_messages(self, parts: Sequence[Part], tag: int) -> Pending:
        pending = Pending([], parts)
        for step in range(1, self.size):
            source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
            for part in parts:
                pending.incoming += self.receive(part.chunk(source), source, tag)
                pending.outgoing += self.send(part.chunk(self.rank), target, tag)
        return pending

    def send(self, tensor: Tensor, peer: int, tag: int) -> list[Any]:
        return [self.group.send([tensor], peer, tag)] if tensor.numel() else []

    def receive(self, tensor: Tensor, peer: int, tag: int) -> list[Any]:
        """Receive from a group rank; nothing for an empty tensor."""
        return [self.group.recv([tensor], peer, tag)] if tensor.numel() else []

    def from_first(self, value: Tensor, purpose: str) -> Tensor:
        """Value of the group's first rank; `value` has its shape and dtype on every rank. *Collective.*"""
        value = value.detach()
        if self.size == 1:
            return value
        if value.layout is not torch.strided:
            return self._sparse_from_first(value, purpose)
        shared = value.to(self.runtime.device, copy=True, memory_format=torch.contiguous_format)
        if shared.numel():
            with events.begin(Label("broadcast", purpose), [shared]), events.waiting():
                # as bytes: not every backend knows every dtype
                dist.broadcast(shared.reshape(-1).view(torch.uint8), group=self.group, group_src=0)
        return shared

    def _sparse_from_first(self, value: Tensor, purpose: str) -> Tensor:
        mine = _dense_parts(value)
        is_coalesced = value.layout is torch.sparse_coo and value.is_coalesced()
        sizes = [size for part in mine for size in part.shape]
        header = self.from_first(torch.tensor([is_coalesced, *sizes], dtype=torch.int64), purpose).tolist()
        is_coalesced, parts = bool(header.pop(0)), []
        for part in mine:
            shape = [header.pop(0) for _ in part.shape]
            parts.append(self.from_first(part if self.rank == 0 else part.new_empty(shape), purpose))
        if value.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(parts[0], parts[1], value.shape, is_coalesced=is_coalesced)
        return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], value.shape, layout=value.layout)

    def scratch(self, place: tuple[int, int], like: Tensor) -> Tensor:
        """A buffer to receive into, shaped like `like`; the same memory for every caller that names this place."""
        held = self._scratch.get(place)
        if held is None or held.numel() < like.nbytes:
            self._scratch.pop(place, None)
            held = self._scratch[place] = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return held[: like.nbytes].view(like.dtype)

    def release_scratch(self) -> None:
        """Free what `scratch` handed out; nothing may be in flight."""
        self._scratch.clear()

    def sum_scalars(self, values: Tensor, purpose: str) -> Tensor:
        """Sum a few fp64 or int64 values over the group, in place; returns them."""
        with events.waiting():
            self.begin_sum(values, purpose).wait()
        return values

    def begin_sum(self, values: Tensor, purpose: str) -> Pending:
        """As `sum_scalars`; the values are sums once this is waited for."""
        if self.size == 1:
            return Pending([])
        with events.begin(Label("all_reduce", purpose), [values]):
            return Pending([self.group.allreduce([values])], [values])

    def largest(self, values: Tensor, purpose: str) -> Tensor:
        """Make each value, none of them NaN, the largest over the group, in place; returns them. *Collective.*"""
        if self.size > 1:
            with events.begin(Label("all_reduce", purpose), [values]), events.waiting():
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


def _dense_parts(value: Tensor) -> list[Tensor]:
    """Dense tensors of a sparse one, in torch's order: indices, then values."""
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value.ccol_indices(), value.row_indices(), value.values()]


def _copy_back(evened: Sequence[Evened]) -> None:
    for each in evened:
        each.copy_back()


@dataclass
class Pending:
    """A collective in flight. It owns the buffers it was given until `wait` has returned.

    incoming: works that bring what this rank is to get. outgoing: works that are done when the others have theirs.
    """

    incoming: list[Any]
    keeps: Sequence[Any] = ()
    finish: Callable[[], None] | None = None
    outgoing: list[Any] = field(default_factory=list)
    is_taken: Callable[[], bool] = lambda: False

    def let_go(self) -> bool:
        """Drop what was given, if the others are known to have it, though who waits for that has not; whether it is
        gone."""
        if self.outgoing and self.is_taken():
            self.keeps = ()
        return not self.keeps

    def receive(self) -> None:
        """Block the host (gloo) or the current stream (NCCL) until this rank has what it is to get. Repeatable."""
        for work in self.incoming:
            events.wait_for(work)
        if self.finish is not None:
            self.finish()
        self.incoming, self.finish = [], None

    def wait(self) -> None:
        """Block until the collective is done, for the others too: buffers may be freed or changed. Repeatable."""
        self.receive()
        for work in self.outgoing:
            events.wait_for(work)
        self.outgoing, self.keeps = [], ()


class _Reads:
    def __init__(self, laid: Sequence[Laid], parts: Sequence[Part]) -> None:
        self._laid = laid
        self._parts = parts
        self._guard = threading.Lock()
        self._done = False

    def wait(self, _limit: timedelta | None = None) -> None:
        """Read, unless that is done; tell the peers. What they have not told yet is waited for as ever."""
        with self._guard:
            if self._done:
                return
            read_parts(self._laid, self._parts)
            self._done = True


def read_parts(laid: Sequence[Laid], parts: Sequence[Part]) -> None:
    """Read what every peer has laid out into its chunk of each part, and tell it."""
    for each in laid:
        for index, part in enumerate(parts):
            each.read(index, part.chunk(each.peer))
        each.finish()
