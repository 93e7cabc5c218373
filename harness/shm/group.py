"""A `torch.distributed` process group whose gathers and reduce-scatters go through shared memory."""

# mypy: disable-error-code="override, assignment"
# torch's stubs have overloads that nobody calls, and other names of arguments

from __future__ import annotations

import json
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.private_torch import backend_of, register_backend, set_default_backend, timeout_of
from harness.shm.segment import Peer, Segment, head_bytes
from harness.shm.transfer import Transport

CPU = torch.device("cpu")
NAME = "shm"
LOG = logging.getLogger(__name__)


def register() -> None:
    """Let torch know the backend "shm", of CPU tensors; a second call does nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    group, why = shared(gloo, rank, size)
    if group is None:
        LOG.info("backend shm of %d ranks is gloo: %s", size, why)
        return gloo
    group.store = store
    return group


def shared(gloo: Any, rank: int, size: int, capacity: int | None = None) -> tuple[ShmGroup | None, str]:
    """A group of these ranks; or None and the reason, the same on all ranks, why all is left to gloo. *Collective.*

    Args:
        gloo: a backend, or a process group, of these ranks.
        capacity: of each rank's segment, in bytes; None: all memory of the host, of which nothing is used at first.
    """
    if size == 1:
        return None, "one rank"
    backend: Any = backend_of(gloo, CPU) if isinstance(gloo, dist.ProcessGroup) else gloo
    said: Any
    try:
        segment = Segment(head_bytes(size), capacity)
        said = [_host(), os.getpid(), segment.file, segment.size, segment.inode]
    except (OSError, AttributeError, RuntimeError) as error:
        said = f"shared memory could not be made: {error}"
    told, peers = _everyones(backend, size, said), dict[int, Peer]()
    why = _first_reason(told)
    if not why and len({host for host, *_ in told}) > 1:
        why = "the ranks are on several hosts, or in several PID namespaces"
    if not why:
        try:
            peers = {peer: Peer(*segment_of) for peer, (_, *segment_of) in enumerate(told) if peer != rank}
        except (OSError, RuntimeError) as error:
            said = f"shared memory of a peer could not be mapped: {error}"
        why = _first_reason(_everyones(backend, size, said))
    if why:
        return None, why
    return ShmGroup(backend, rank, size, Transport(rank, segment, peers, lambda: timeout_of(backend))), ""


class ShmGroup(dist.ProcessGroup):
    """Ranks of one host; made by `shared`. What shared memory does not do better, gloo does.

    gloo: their backend.
    """

    def __init__(self, gloo: Any, rank: int, size: int, transport: Transport) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # torch's stubs know the one with a store
        register_backend(self, CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        set_default_backend(self, dist.ProcessGroup.BackendType.GLOO)
        self.transport = transport

    store: Any = None
    """Store by which torch made the group; None of one beside another."""

    def get_group_store(self) -> Any:
        return self.store

    def getBackendName(self) -> str:
        return NAME

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that peers read in place, shape [numel], uninitialised; it is free again when no tensor uses it.

        Raises:
            RuntimeError: there is no more shared memory.
        """
        _, block = self.transport.segment.allocate(numel * dtype.itemsize)
        return block[: numel * dtype.itemsize].view(dtype)

    def register(self) -> None:
        """Nothing: what was allocated is known to all peers."""

    def settle(self) -> None:
        """Wait until peers have read all that complete collectives have given them; raises as `Work.wait`."""
        self.transport.settle()

    def holds(self, tensor: Tensor) -> bool:
        """True if peers can read a tensor in place."""
        return self.transport.segment.find(tensor) is not None

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None, *, until_settled: bool = False
    ) -> Any:
        """Several gathers at once; ranks may give tensors of different lengths.

        until_settled: inputs of `allocate` stay as they are until `settle`, not only until this is waited for.
        """
        outs = [[row[rank] for row in outputs] for rank in range(self.size())]
        given = [each.detach().contiguous() for each in inputs]
        return self.transport.gather(given, outs, until_settled=until_settled)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(-1).chunk(self.size()))], [given.reshape(-1)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Several sums, or averages, at once, each in rank order and in its output's dtype, which may be wider than the
        inputs'. NotImplementedError: another operation."""
        given_op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        operation = getattr(given_op, "op", given_op)
        divisor = {dist.ReduceOp.SUM: 1, dist.ReduceOp.AVG: self.size()}.get(operation)
        if divisor is None:
            raise NotImplementedError(f"a reduce-scatter by {operation} goes over a group of gloo")
        given = [[row[rank].detach().reshape(-1) for row in inputs] for rank in range(self.size())]
        flat = [output.view(-1) for output in outputs]
        return self.transport.reduce_scatter(given, flat, divisor=divisor)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output.view(-1)], [list(given.reshape(-1).chunk(self.size()))], opts)

    def abort(self) -> None:
        """Make whatever waits in this group fail at once, here and on peers."""
        self.transport.abort()

    shutdown = abort  # which torch calls when the group is destroyed


def _everyones(gloo: Any, size: int, value: Any) -> list[Any]:
    """Every rank's value, as JSON has it, in at most 4,000 bytes. *Collective.*"""
    rows = torch.zeros(size, 4000, dtype=torch.uint8)
    gloo.allgather([list(rows)], [torch.tensor(list(json.dumps(value).encode().ljust(4000)), dtype=torch.uint8)]).wait()
    return [json.loads(bytes(row.tolist())) for row in rows]


def _first_reason(told: list[Any]) -> str:
    return next((f"rank {rank}: {said}" for rank, said in enumerate(told) if isinstance(said, str)), "")


def _host() -> str:
    """Text that two processes share if one can name the other by its process id. OSError: the system tells none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii") + os.readlink("/proc/self/ns/pid")
