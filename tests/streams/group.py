"""A process group that orders its collectives as NCCL's does, checks what it is given, and moves data over gloo.

[Note: As NCCL orders] A communicator has one stream. A collective waits for the stream it is issued on, runs on the
communicator's stream behind all collectives before it, and holds its tensors until it is waited for; `wait` makes the
current stream wait for its end, and the host goes on. One that was not asked to be asynchronous (`asyncOp=False`, what
`torch.distributed.all_reduce` says) runs on the current stream itself. All this is what ProcessGroupNCCL does in torch
2.11; there is no `record_stream` in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.streams.cuda import ALLOCATOR, Event, Stream
from tests.streams.log import Kernel, Wait
from tests.streams.recorder import Recorder
from tests.streams.site import site

BACKEND = "recorded"
_RECORDERS: list[Recorder] = []
"""The recorder of this process, while there is one."""


class Work:
    def __init__(self, recorder: Recorder | None, end: Event | None, held: Sequence[Tensor]) -> None:
        self._recorder, self._end, self._held = recorder, end, list(held)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._recorder is not None and self._end is not None:
            self._recorder.cuda.current.wait_event(self._end, "work")
        self._held.clear()
        return True


class RecordedGroup(dist.ProcessGroup):
    """One communicator.

    Raises, in every collective:
        ValueError: an argument that NCCL would refuse, or ranks that do not ask for the same.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.order: list[str] = []
        """What was asked for, one after another: the same on all ranks."""
        self.registered: list[int] = []
        """Pools whose memory is registered."""

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_desc(self) -> str:
        return getattr(self, "_desc", "")

    @group_desc.setter
    def group_desc(self, value: str) -> None:
        self._desc = value

    @property
    def stream_name(self) -> str:
        return f"nccl {self.label}"

    label = ""
    """Names it in reports."""
    ranks: tuple[int, ...] = ()
    """Its ranks, by their numbers in the default group."""

    # -- what the engine asks a backend ----------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> RecordedGroup:
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def name(self) -> str:
        return BACKEND

    getBackendName = name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def mem_allocator(self) -> object:
        return ALLOCATOR

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """A meeting of all ranks."""
        self._meet(f"register {symm}", [])
        self.registered.append(pool.number)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.registered.remove(pool.number)

    def abort(self) -> None:
        """Nothing is in flight."""

    def _set_sequence_number_for_group(self) -> None:
        """Not used."""

    # -- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        self._meet("barrier", [])
        return Work(None, None, [])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = _name_of(opts.reduceOp) if opts is not None else "SUM"

        def run() -> None:
            for tensor, every in zip(tensors, zip(*self._meet(f"allreduce {op}", tensors), strict=True), strict=True):
                tensor.copy_(_combined(every, op))

        return self._issue("all_reduce", tensors, tensors, run, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        root = opts.rootRank if opts is not None else 0

        def run() -> None:
            for tensor, got in zip(tensors, self._meet(f"broadcast {root}", tensors)[root], strict=True):
                tensor.copy_(got)

        reads, writes = (tensors, []) if self._rank == root else ([], tensors)
        return self._issue("broadcast", reads, writes, run, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        for chunks, own in zip(outputs, inputs, strict=True):
            _check_alike([*chunks, own], "allgather")
            if [each.numel() for each in chunks] != [own.numel()] * self._size:
                raise ValueError(
                    f"allgather: {len(chunks)} chunks for {self._size} ranks, or of other lengths than mine"
                )

        def run() -> None:
            for rank, got in enumerate(self._meet("allgather", inputs)):
                for chunks, chunk in zip(outputs, got, strict=True):
                    chunks[rank].copy_(chunk.view_as(chunks[rank]))

        return self._issue("all_gather", inputs, [c for chunks in outputs for c in chunks], run, opts)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [own], opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        self._check_parts(outputs, inputs, "allgather_into_tensor")

        def run() -> None:
            for rank, got in enumerate(self._meet("allgather_into", inputs)):
                for whole, chunk in zip(outputs, got, strict=True):
                    whole.view(self._size, -1)[rank].copy_(chunk.view(-1))

        return self._issue("all_gather", inputs, outputs, run, opts)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        self._check_parts(inputs, outputs, "reduce_scatter_tensor")
        op = _name_of(opts.reduceOp) if opts is not None else "SUM"

        def run() -> None:
            for out, every in zip(outputs, zip(*self._meet("reduce_scatter", inputs), strict=True), strict=True):
                own = [each.view(self._size, -1)[self._rank] for each in every]
                out.copy_(_combined(own, op).view_as(out))

        return self._issue("reduce_scatter", inputs, outputs, run, opts)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work:
        _check_alike([output, given], "alltoall")
        if sum(output_sizes) != output.numel() or sum(input_sizes) != given.numel():
            raise ValueError(f"alltoall: sizes {output_sizes}, {input_sizes} for {output.numel()}, {given.numel()}")

        def run() -> None:
            got = [each[0].split(input_sizes) for each in self._meet(f"alltoall {input_sizes}", [given])]
            output.copy_(torch.cat([each[self._rank] for each in got]))

        return self._issue("all_to_all", [given], [output], run, opts)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_parts(self, wholes: list[Tensor], parts: list[Tensor], what: str) -> None:
        """Chunks of equal length, of one dtype, side by side; a chunk may lie where the whole has it."""
        for whole, part in zip(wholes, parts, strict=True):
            _check_alike([whole, part], what)
            if whole.numel() != self._size * part.numel():
                raise ValueError(f"{what}: {whole.numel()} elements for {self._size} chunks of {part.numel()}")
            own = whole.view(self._size, -1)[self._rank]
            overlaps = part.untyped_storage()._cdata == whole.untyped_storage()._cdata and _overlap(whole, part)
            if overlaps and part.data_ptr() != own.data_ptr():
                raise ValueError(f"{what}: this rank's chunk lies in the whole, and not at its own place")

    def _issue(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[], None], opts: Any
    ) -> Work:
        held = [*reads, *writes]
        recorder = _RECORDERS[-1] if _RECORDERS else None
        with torch.no_grad(), _disable_current_modes():
            if recorder is None:
                run()
                return Work(None, None, [])
            asynchronous = opts is None or getattr(opts, "asyncOp", True)
            line, cuda = site(), recorder.cuda
            stream = cuda.current.name
            if asynchronous:
                issued = Event(cuda)
                issued.record()
                stream = self.stream_name
                recorder.put(Wait(stream, issued.number or 0, line, "issue"))
            whole = max(sum(each.nbytes for each in reads), sum(each.nbytes for each in writes))
            moved = whole * (2 if name == "all_reduce" else 1)
            spans = recorder.spans(reads), recorder.spans(writes)
            recorder.put(Kernel(f"nccl {name}", stream, *spans, line, 0, moved, self.stream_name))
            with recorder.paused():
                run()
            if not asynchronous:
                return Work(None, None, [])
            end = Event(cuda)
            end.record(Stream(cuda, stream))
            return Work(recorder, end, held)

    def _meet(self, what: str, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """What every rank gives, by rank.

        Raises:
            ValueError: ranks ask for different things.
        """
        asked = f"{what} {[(t.numel(), str(t.dtype)) for t in tensors]}"
        self.order.append(asked)
        head = torch.tensor([zlib.crc32(asked.encode())], dtype=torch.int64)
        flat = [head.view(torch.uint8), *(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors)]
        mine = torch.cat(flat)
        heads = self._gather(head)
        if len({int(each) for each in heads}) > 1:
            raise ValueError(f"ranks of {self.label} do not ask for the same: this one for {asked}")
        bounds = [each.numel() for each in flat]
        return [
            [part.view(t.dtype).view(t.shape) for part, t in zip(got.split(bounds)[1:], tensors, strict=True)]
            for got in self._gather(mine)
        ]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([every], [mine]).wait()
        return every


_OPS = ("SUM", "AVG", "MAX", "MIN")


def _name_of(op: Any) -> str:
    return next(name for name in _OPS if op == getattr(dist.ReduceOp, name))


def _combined(every: Sequence[Tensor], op: str = "SUM") -> Tensor:
    total = every[0].clone()
    for each in every[1:]:
        if op in ("SUM", "AVG"):
            total += each
        else:
            total = torch.maximum(total, each) if op == "MAX" else torch.minimum(total, each)
    return total / len(every) if op == "AVG" else total


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _check_alike(tensors: Sequence[Tensor], what: str) -> None:
    dtypes = {each.dtype for each in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"{what}: tensors of several dtypes, {sorted(map(str, dtypes))}")
    if not all(each.is_contiguous() for each in tensors):
        raise ValueError(f"{what}: a tensor is not contiguous")


def new_group(ranks: Sequence[int], label: str) -> RecordedGroup:
    """A communicator of these ranks, which all call this. *Collective.*"""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, RecordedGroup, devices=["cpu"])
    group = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    assert isinstance(group, RecordedGroup)
    group.label, group.ranks = label, tuple(ranks)
    return group


def listens(recorder: Recorder) -> Callable[[], None]:
    """Collectives of this process are written down by a recorder from now on; returns a function to end it."""
    _RECORDERS.append(recorder)
    return lambda: _RECORDERS.remove(recorder)
