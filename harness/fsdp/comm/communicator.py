"""One process group of the engine: all-gathers of buckets, and small collectives of a step.

Buckets move over NCCL, over gloo, or, between ranks of one host, over shared memory (`harness.shm`), by a group of the
engine's own beside the program's. All are used by the same calls. They differ in two ways: shared memory takes several
tensors and chunks of different lengths in one call, and sums in rank order and in the dtype of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import CONTROL, Label
from harness.fsdp.options import Options, Transport
from harness.private_torch import backend_of
from harness.shm import ShmGroup, shared


class Cut:
    """Where the chunks of a flat tensor lie, one for each rank; what holds of all of them is found once.

    spans: of each rank's chunk, begin and end (elements). covers: begin and end of all chunks together; None where they
    do not lie one after another.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = tuple(spans)
        self.sizes = [end - begin for begin, end in self.spans]
        self.longest, self.is_even = max(self.sizes), len(set(self.sizes)) == 1
        are_closed_up = all(one[1] == following[0] for one, following in pairwise(self.spans))
        self.covers = (self.spans[0][0], self.spans[-1][1]) if are_closed_up else None

    @cached_property
    def closed_up(self) -> Cut:
        """Chunks of the same lengths that lie one after another, from 0 on."""
        return Cut(pairwise([0, *accumulate(self.sizes)]))


class Part(NamedTuple):
    tensor: Tensor
    cut: Cut

    @classmethod
    def evenly(cls, tensor: Tensor, size: int) -> Part:
        """Cut into chunks of equal length, the last ones shorter where it does not divide."""
        return cls(tensor, even_cut(tensor.numel(), size))

    @property
    def chunks(self) -> Tensor:
        """All chunks as one view: flat where they lie one after another, else [ranks, length of each]."""
        if (covers := self.cut.covers) is not None:
            return self.tensor[covers[0] : covers[1]]
        spans = self.cut.spans  # of one length where they lie apart
        size, spacing = (len(spans), self.cut.longest), spans[1][0] - spans[0][0]
        return self.tensor.as_strided(size, (spacing, 1), self.tensor.storage_offset() + spans[0][0])

    def by_rank(self) -> list[Tensor]:
        if (covers := self.cut.covers) is None:
            return [self.tensor[begin:end] for begin, end in self.cut.spans]
        return list(self.tensor[covers[0] : covers[1]].split_with_sizes(self.cut.sizes))

    def chunk(self, rank: int) -> Tensor:
        begin, end = self.cut.spans[rank]
        return self.tensor[begin:end]


@cache
def even_cut(numel: int, size: int) -> Cut:
    """`size` chunks of equal length of `numel` elements, the last ones shorter where it does not divide."""
    step = -(-numel // size)
    return Cut(pairwise(min(rank * step, numel) for rank in range(size + 1)))


class Evened:
    """A part as one tensor of equal chunks: a view, or, where chunks lie apart or the last ones are shorter, memory of
    its own that they are copied into.

    NCCL moves equal chunks that lie one after another; of others torch would make one call or copy a rank.

    sent: the rank whose chunk is copied; None: all are.
    """

    def __init__(self, part: Part, sent: int | None = None) -> None:
        size, self._given = len(part.cut.spans), part
        self.is_copy = not part.cut.is_even or part.cut.covers is None
        self.part = Part.evenly(part.tensor.new_empty(part.cut.longest * size) if self.is_copy else part.chunks, size)
        self.copy(sent)

    def copy(self, rank: int | None = None, *, back: bool = False) -> None:
        """Copy all chunks, or a rank's, to where the collective has them, or `back` from there."""
        if not self.is_copy:
            return
        given = self._given.chunks if rank is None else self._given.chunk(rank)
        own = (self.part.tensor if rank is None else self.part.chunk(rank))[: given.numel()].view(given.shape)
        target, source = (given, own) if back else (own, given)
        target.copy_(source)


KNOWN = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})


class Communicator:
    """One process group: its ranks and what moves its buckets.

    shm: the group over shared memory beside `group` that moves buckets; None: `group` does.

    Args:
        group: process group; None is the default one.
        runtime: streams of the device the buckets live on.
        transport: whether a gloo group may have shared memory beside it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, runtime: DeviceRuntime, transport: Transport = Options.transport
    ) -> None:
        self.group, self.runtime = cast(dist.ProcessGroup, group or dist.group.WORLD), runtime
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.backend: Any = backend_of(self.group, runtime.device)
        self.is_gloo = self.backend.name() == "gloo"
        self.shm: ShmGroup | None = None
        self.why_gloo = "one rank" if self.size == 1 else f"transport={transport.name}"
        if self.is_gloo and runtime.device.type == "cpu" and transport is Transport.auto and self.size > 1:
            with events.begin(Label("all_gather", "shared memory")):
                self.shm, self.why_gloo = shared(self.group, self.rank, self.size)

    def facts(self) -> dict[str, str]:
        """How buckets move: the backend, and why it is gloo where that is."""
        by_gloo = {"why": self.why_gloo} if self.is_gloo else {}
        return {"transport": "shm"} if self.shm is not None else {"transport": self.backend.name()} | by_gloo

    def settle(self) -> None:
        """Wait until peers have read this rank's part of all gathers that are complete here."""
        if self.shm is not None:
            with events.waiting():
                self.shm.settle()

    def all_gather(
        self,
        parts: Sequence[Part],
        label: Label,
        own: Sequence[Tensor] | None = None,
        *,
        is_second_leg: bool = False,
    ) -> Pending:
        """Fill every rank's chunk of each part from that rank.

        The parts belong to the returned handle until it is waited for.

        own: what this rank's chunks are filled from, which `reads` must be true of; None: they hold their data. Peers
        may read either until `settle`. is_second_leg: of a collective announced before, of which peers read nothing
        once it is waited for.
        """
        if self.size == 1:
            return Pending([])
        with events.resume(label) if is_second_leg else events.begin(label, parts):
            if self.shm is not None:
                rows = [part.by_rank() for part in parts]
                own = own or [row[self.rank] for row in rows]
                events.offer(sum([each.nbytes for each in own]) * (self.size - 1))
                return Pending([self.shm.allgather(rows, list(own), until_settled=not is_second_leg)], parts)
            evened = [Evened(part, self.rank) for part in parts]
            outputs = [self.as_sent(each.part.tensor) for each in evened]
            inputs = [self.as_sent(each.part.chunk(self.rank)) for each in evened]
            work = self.group.allgather_into_tensor_coalesced(outputs, inputs)
            return Pending([work], parts, finish=[partial(each.copy, back=True) for each in evened if each.is_copy])

    def reads(self, own: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """True if peers read these, which are of one dtype, in place, for parts of this one."""
        return self.shm is not None and own[0].dtype == dtype and all(map(self.shm.holds, own))

    def as_sent(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as the backend moves it: what not every backend knows, as bytes."""
        return tensor if tensor.dtype in KNOWN else tensor.view(torch.uint8)

    def from_first(self, value: Tensor, purpose: str) -> Tensor:
        """Value of the group's first rank; `value` has its shape and dtype on every rank. *Collective.*"""
        value = value.detach()
        if self.size == 1:
            return value
        shared = value.to(self.runtime.device, copy=True, memory_format=torch.contiguous_format)
        if shared.numel():
            with events.begin(Label("broadcast", purpose), [shared]), events.waiting():
                # as bytes: not every backend knows every dtype
                dist.broadcast(shared.reshape(-1).view(torch.uint8), group=self.group, group_src=0)
        return shared

    def sum_scalars(self, values: Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or another operation) a few fp64 or int64 values over the group, in place; returns them."""
        if self.size > 1:
            with events.waiting(Label("all_reduce", purpose)):
                self.begin_sum(values, purpose, operation).wait()
        return values

    def begin_sum(self, values: Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM) -> Pending:
        """As `sum_scalars`; the values are sums once this is waited for."""
        if self.size == 1:
            return Pending([])
        with events.begin(Label("all_reduce", purpose), [values]):
            return Pending([dist.all_reduce(values, operation, self.group, async_op=True)], [values])

    def all_succeeded(self, mine: bool) -> bool:
        """True if every rank says so; no traffic of the step's. *Collective*; makes a lazy communicator exist."""
        flag = torch.tensor([int(mine)], dtype=torch.int32, device=self.runtime.device)
        with events.resume(CONTROL), events.waiting():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.group)
            return bool(flag.item())


@dataclass
class Pending:
    """A collective in flight. It owns the buffers it was given until `wait` has returned.

    finish: called once each, when everything has come in.
    """

    incoming: list[Any]
    keeps: Sequence[Any] = ()
    finish: Sequence[Callable[[], None]] = ()

    def wait(self) -> None:
        """Block the host (gloo, shared memory) or the current stream (NCCL) until it is done here. Repeatable."""
        for work in self.incoming:
            work.wait()
        for each in self.finish:
            each()
        self.incoming, self.finish, self.keeps = [], (), ()
