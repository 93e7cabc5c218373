"""Traffic of collectives, counted outside every engine.

Every c10d operation, also those of DDP's C++ reducer, passes the dispatcher. A kernel on its autograd key counts the
call and passes it on below autograd, where the backend's own kernel runs unchanged. That way through Python costs some
40 us, so the methods of `ProcessGroup` that engines call from Python count by themselves (4 us) and enter the
dispatcher below autograd at once: a call is counted by its method or by its kernel, never by both. Functional
collectives, by which DTensors move (tensor parallelism), reach the backend from C++ below autograd, where no kernel
sees them; their operations are counted, and their waits told, where Python calls them. Those of compiled code are not
seen.

Bytes are what this rank has to send, whatever the algorithm, N being the size of the group:

    all_gather       its shard to N - 1 others: S (N - 1) / N of the full size S
    reduce_scatter   all of its input but its own shard: S (N - 1) / N
    all_reduce       both of these: 2 S (N - 1) / N, rounded up to a whole byte
    all_to_all, send exactly what leaves for other ranks; a receive is counted at its sender
    broadcast        S (N - 1) at the root, 0 elsewhere; scatter, gather and reduce alike at whoever sends

What an engine of several operations makes of these is `harness.probe.collectives`'s to say.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")

UNLABELLED = ""
FUNCTIONAL = "(tensor parallel)"


@dataclass(frozen=True)
class Row:
    kind: str
    bucket: str
    count: int
    bytes: int


class Traffic:
    """Counts this process's collectives from its construction to `close`. One is active at a time."""

    yields = True
    """Gives way to one that does not: a watched loop's counts are beside the point where an engine is measured."""

    def __init__(self) -> None:
        """Raises `RuntimeError`: another one is active, and does not give way."""
        global _active
        if _active is not None and (self.yields or not _active.yields):
            raise RuntimeError("another meter counts the collectives of this process: close it first")
        _install()
        self._guard = threading.Lock()  # DDP's reducer calls from autograd's threads
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._paused = False
        _active = self

    def close(self) -> None:
        global _active
        if _active is self:
            _active = None

    def counted(self, kind: str, num_bytes: int) -> None:
        """Count an operation of torch, before it runs."""
        self.add(kind, UNLABELLED, 1, num_bytes)

    def functional(self, kind: str) -> str | None:
        """Bucket to count a functional collective under; None: it is not to be counted."""
        return FUNCTIONAL

    def functional_wait(self) -> AbstractContextManager[Any]:
        """Context of the wait for a functional collective."""
        return nullcontext()

    def add(self, kind: str, bucket: str, count: int, num_bytes: int) -> None:
        if self._paused:
            return
        with self._guard:
            entry = self._counts.setdefault((kind, bucket), [0, 0])
            entry[0] += count
            entry[1] += num_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take(self) -> list[Row]:
        """Rows since the last call, in order of first use; resets the counts."""
        with self._guard:
            taken, self._counts = self._counts, {}
        return [Row(kind, bucket, count, num_bytes) for (kind, bucket), (count, num_bytes) in taken.items()]


def by_kind(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Rows summed over buckets, as in the record: {"all_gather": {"count": n, "bytes": b}, ...}."""
    totals: dict[str, dict[str, int]] = {}
    for row in rows:
        total = totals.setdefault(row.kind, {"count": 0, "bytes": 0})
        total["count"] += row.count
        total["bytes"] += row.bytes
    return totals


_active: Traffic | None = None
_library: torch.library.Library | None = None
"""Keeps the kernels registered for the process's life; they count only while a meter is active."""

Arguments = Sequence[Any]
Cost = Callable[[Arguments, int, int], int]
"""Bytes this rank sends, from an operation's arguments without group, the group's size, and this rank's place in it."""


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _all_reduce(args: Arguments, size: int, rank: int) -> int:
    return -(-2 * _bytes(args[0]) * (size - 1) // size)


def _broadcast(args: Arguments, size: int, rank: int) -> int:
    return _bytes(args[0]) * (size - 1) if rank == args[1] else 0


def _reduce_scatter(args: Arguments, size: int, rank: int) -> int:
    return _bytes(args[1]) - _bytes(args[0])


def _to_each_other(inputs: int) -> Cost:
    """Args: inputs: place of the argument that each other rank gets."""
    return lambda args, size, rank: _bytes(args[inputs]) * (size - 1)


def _exchange(whole: Tensor, splits: Sequence[int], size: int, rank: int) -> int:
    if not splits:
        return _bytes(whole) * (size - 1) // size
    rows = sum(splits)
    return _bytes(whole) * (rows - splits[rank]) // rows if rows else 0


def _scatter(args: Arguments, size: int, rank: int) -> int:
    _, inputs, root, *_ = args
    return sum(_bytes(row) - _bytes(row[root]) for row in inputs) if rank == root else 0


OPERATIONS: dict[str, tuple[str, Cost]] = {
    "allgather_": ("all_gather", _to_each_other(1)),
    "_allgather_base_": ("all_gather", _to_each_other(1)),
    "allgather_coalesced_": ("all_gather", _to_each_other(1)),
    "allgather_into_tensor_coalesced_": ("all_gather", _to_each_other(1)),
    "reduce_scatter_": ("reduce_scatter", _reduce_scatter),
    "_reduce_scatter_base_": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _reduce_scatter),
    "allreduce_": ("all_reduce", _all_reduce),
    "allreduce_coalesced_": ("all_reduce", _all_reduce),
    "alltoall_": ("all_to_all", lambda args, size, rank: _bytes(args[1]) - _bytes(args[1][rank])),
    "alltoall_base_": ("all_to_all", lambda args, size, rank: _exchange(args[1], args[3], size, rank)),
    "broadcast_": ("broadcast", _broadcast),
    "scatter_": ("scatter", _scatter),
    "gather_": ("gather", lambda args, size, rank: 0 if rank == args[2] else _bytes(args[1])),
    "reduce_": ("reduce", lambda args, size, rank: 0 if rank == args[2] else _bytes(args[0])),
    "send": ("send", lambda args, size, rank: _bytes(args[0])),
}

METHODS = (
    *("_allgather_base", "allgather", "allgather_into_tensor_coalesced", "allreduce", "alltoall", "alltoall_base"),
    *("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "send"),
)
"""Methods of ProcessGroup on engines' hot paths, with their operations' arguments; others are counted by the kernel of
their operation, which has a name that ends in an underscore."""


def _scatter_sums(args: Arguments, size: int, rank: int) -> int:
    return _bytes(args[0]) * (size - 1) // size


FUNCTIONALS: dict[str, tuple[str, Cost]] = {
    "all_gather_into_tensor": ("all_gather", _to_each_other(0)),
    "all_gather_into_tensor_coalesced": ("all_gather", _to_each_other(0)),
    "all_reduce": ("all_reduce", _all_reduce),
    "all_reduce_coalesced": ("all_reduce", _all_reduce),
    "reduce_scatter_tensor": ("reduce_scatter", _scatter_sums),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _scatter_sums),
    "all_to_all_single": ("all_to_all", lambda args, size, rank: _exchange(args[0], args[2], size, rank)),
    "broadcast": ("broadcast", _broadcast),
}


def _install() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")
    for name, (kind, cost) in OPERATIONS.items():
        kernel = _counting_kernel(name, kind, cost)
        for key in AUTOGRAD_KEYS:
            _library.impl(name, kernel, key)
    for name in METHODS:
        kind, cost = OPERATIONS[name if name in OPERATIONS else f"{name}_"]
        setattr(dist.ProcessGroup, name, _counting_method(name, kind, cost))
    for name, (kind, cost) in FUNCTIONALS.items():
        packet = getattr(torch.ops._c10d_functional, name)
        packet._op = _counting_call(packet._op, kind, cost)
    packet = torch.ops._c10d_functional.wait_tensor
    packet._op = _told_wait(packet._op)


def _counting_call(original: Callable[..., Any], kind: str, cost: Cost) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        bucket = _active.functional(kind) if _active is not None and not options else None
        if _active is not None and bucket is not None:
            group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined] # torch exports no other way from a name
            _active.add(kind, bucket, 1, cost(args[:-1], group.size(), group.rank()))
        return original(*args, **options)

    return call


def _told_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*args: Any) -> Any:
        with nullcontext() if _active is None else _active.functional_wait():
            return original(*args)

    return wait


def _counting_kernel(name: str, kind: str, cost: Cost) -> Callable[..., Any]:
    operation = getattr(torch.ops.c10d, name).default

    def kernel(*args: Any) -> Any:
        if _active is not None:
            place = next(i for i, arg in enumerate(args) if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(args[place])
            _active.counted(kind, cost((*args[:place], *args[place + 1 :]), group.size(), group.rank()))
        with torch._C._AutoDispatchBelowAutograd():
            return operation(*args)

    return kernel


def _counting_method(name: str, kind: str, cost: Cost) -> Callable[..., Any]:
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        if options:  # an unusual call: leave it to the kernel
            return original(group, *args, **options)
        if _active is not None:
            _active.counted(kind, cost(args, group.size(), group.rank()))
        with torch._C._AutoDispatchBelowAutograd():
            return original(group, *args)

    return method
