"""Reduce gradients under a dtype policy, on any backend.

A reduction turns the unreduced gradients of a bucket into this rank's share of their sum, by four verbs: *encode*
(gradient to wire), *exchange* (issue the traffic), *fold* (wire into the sums, made in the accumulate dtype) and
*finish* (sums to main gradients, scaled once a step). The first and the last are verbs of `Floating` and `Integers`:
they say what a gradient is on the way, and also *absorb* microbatches that are added up before any traffic.

Where a backend would sum in the wire dtype, or in an order of its own, contributions are sent to the rank that owns
them (all-to-all) and summed there in rank order. On gloo this is always so: its reduce-scatter is an all-reduce inside
(twice the bytes) and sums 16-bit wires in 16 bits. Shared memory sums as it is asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Evened, Part, Pending
from harness.fsdp.comm.device import copy_together, is_queued, scale_together
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.fixed_point import FixedPoint
from harness.fsdp.policy import Dtypes
from harness.fsdp.vocabulary import Numerics
from harness.private_torch import foreach_add_
from harness.shm import sum_in_order
from harness.shm.transfer import BLOCK


class Floating:
    scales_sums = True

    def __init__(self, dtypes: Dtypes) -> None:
        self.dtypes = dtypes

    def encode(self, gradients: Tensor) -> Tensor:
        """Gradients, or sums of them, as they are sent: the same tensor where they already are. Flat."""
        return gradients.to(self.dtypes.wire)

    def absorb(self, gradients: Tensor, sums: Tensor, *, add: bool) -> None:
        """Put (or `add`) unreduced gradients into sums of the same length."""
        (sums.add_ if add else sums.copy_)(gradients)

    def finish(self, sums: Sequence[Tensor], main: Sequence[Tensor], factor: float) -> None:
        """Turn sums into main gradients (the same tensors, or others), scaled; those on the host follow the device."""
        scale_together(sums, factor)
        copy_together(main, sums, follows=False)


class Integers:
    """Multiples of 2^-bits; see [Note: Exact sums].

    divisor: of the finished sums; a factor, which could not be undone exactly, is not used. beyond: int64, shape [1]:
    blocks of this step in which an element could not be written down.
    """

    scales_sums = False

    def __init__(self, fixed: FixedPoint, divisor: float, device: torch.device) -> None:
        self.fixed, self.divisor = fixed, divisor
        self.beyond = torch.zeros(1, dtype=torch.int64, device=device)

    def encode(self, gradients: Tensor) -> Tensor:
        if gradients.dtype == torch.int64:
            return gradients
        encoded = torch.empty_like(gradients, dtype=torch.int64)
        self.fixed.encode(gradients, encoded, self.beyond)
        return encoded

    def absorb(self, gradients: Tensor, sums: Tensor, *, add: bool) -> None:
        self.fixed.encode(gradients, sums, self.beyond, add=add)

    def finish(self, sums: Sequence[Tensor], main: Sequence[Tensor], factor: float) -> None:
        for source, target in zip(sums, main, strict=True):
            self.fixed.decode(source, self.divisor, target)


Numbers = Floating | Integers


PACKED_BYTES = {True: 32 << 20, False: 1 << 18}
"""A bucket of at most so many bytes is sent as one message, by whether work is queued: copying that takes some 20 us on
a GPU, about what giving it another message takes the host; and some 50 us on a CPU, less than a message over gloo."""


@dataclass
class Exchange:
    """Traffic of one reduction between `exchange` and `fold`.

    parts: the encoded gradients, cut by owner. label: which bucket. factor: what the sums are multiplied with where no
    later one is added to them; 1 leaves that to `finish`. received: what comes for this rank: its sums, a part each, or
    all contributions to them.
    """

    parts: list[Part]
    label: Label
    factor: float = 1.0
    pending: Pending = field(default_factory=lambda: Pending([]))
    received: list[Tensor] = field(default_factory=list)


class Reduction:
    """The sums of gradients over the ranks of an axis.

    is_native: the backend's own reduce-scatter and all-reduce make them: shared memory's, and NCCL's where the wire has
    the sum's dtype. Else they are made here. An all-reduce of the backend's is a reduce-scatter and
    an all-gather where an outer reduction comes between the two, or where sums are made in rank order; else one call,
    which a switch may make (NVLS, SHARP).

    in_order: sums made here are made in rank order, one contribution after the other, so that bits do not depend on the
    layout; else in one operation.

    Args:
        numbers: what gradients are on the way; None: floating-point numbers of `dtypes`.
        legs_apart: whether something comes between the two legs of an all-reduce.
    """

    def __init__(
        self,
        comm: Communicator,
        dtypes: Dtypes,
        numerics: Numerics,
        numbers: Numbers | None = None,
        *,
        legs_apart: bool = False,
    ) -> None:
        self.comm, self.dtypes, self.legs_apart = comm, dtypes, legs_apart
        self.numbers: Numbers = numbers or Floating(dtypes)
        # in 16 bits a backend may round each partial sum or none, and the order of sums changes the result
        sums_as_sent = dtypes.wire == dtypes.accum and dtypes.accum.itemsize >= 4
        sums_otherwise = numerics is not Numerics.exact and (numerics.bitwise or not sums_as_sent)
        self.is_native = comm.sums_in_order or not (comm.is_gloo or sums_otherwise)
        self.in_order = numerics.bitwise or comm.is_gloo

    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        """Issue the traffic that brings contributions to their owners. The parts belong to the result until folded."""
        exchange = Exchange(parts, label, factor)
        if self.comm.size == 1:
            exchange.received = [part.chunk(0) for part in parts]
            return exchange
        with events.begin(label, parts):
            (self._reduce_scatter if self.is_native else self._all_to_all)(exchange)
        return exchange

    def fold(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        """Sum this rank's chunks of all contributions and copy them (or `add` them) to `into`, one tensor a part.

        `into` may be this rank's own chunks of the parts themselves, which are free to change afterwards.
        """
        exchange.pending.wait()
        received, exchange.received = exchange.received, []
        if self._is_one_call(exchange.label):
            return  # `spread` has the whole sums
        if not self.is_native:
            size, accum = self.comm.size, self.dtypes.accum
            rows = [each.view(size, each.numel() // size) for each in received]
            came_as_one, widths = len(rows) < len(into), [part.cut.longest for part in exchange.parts]
            if self.in_order:
                for row, target in zip(rows[0].split(widths, 1) if came_as_one else rows, into, strict=True):
                    total = torch.empty_like(target, dtype=accum) if add else target
                    block = max(1, target.numel()) if is_queued(target.device) else BLOCK
                    sum_in_order(list(row[:, : target.numel()]), total, accum, block=block)
                    if add:
                        target.add_(total)
                    scale_together([target], exchange.factor)
                return
            received = [row.sum(dim=0, dtype=accum) for row in rows]
            if came_as_one:
                received = [sums[: to.numel()] for sums, to in zip(received[0].split(widths), into, strict=True)]
        (foreach_add_ if add else copy_together)(into, received)
        scale_together(into, exchange.factor)

    def spread(self, exchange: Exchange, whole: Sequence[Part]) -> Pending:
        """Second leg of an all-reduce, after `fold`: give every rank the whole sums, cut as they were made."""
        if not self._is_one_call(exchange.label):
            return self.comm.all_gather(whole, exchange.label, is_second_leg=True)
        targets = [part.tensor for part in whole]
        copy_together(targets, [part.tensor for part in exchange.parts])
        scale_together(targets, exchange.factor)
        return Pending([])

    # -- traffic of `exchange` -----------------------------------------------------------------------------------------

    def _all_to_all(self, exchange: Exchange) -> None:
        """For sums made here: small buckets travel as one message (see `PACKED_BYTES`)."""
        comm, parts = self.comm, exchange.parts
        for part in _messages(parts):
            own = part.cut.sizes[comm.rank]
            received = part.tensor.new_empty(own * comm.size)
            output, given = comm.as_sent(received), comm.as_sent(part.chunks.reshape(-1))
            width = received.itemsize // output.itemsize
            sizes = part.cut.sizes if width == 1 else [size * width for size in part.cut.sizes]
            work = comm.group.alltoall_base(output, given, [own * width] * comm.size, sizes)
            exchange.received.append(received)
            exchange.pending.incoming.append(work)

    def _is_one_call(self, label: Label) -> bool:
        apart = self.legs_apart or self.comm.sums_in_order or not self.is_native or self.comm.size == 1
        return label.kind == "all_reduce" and not apart

    def _reduce_scatter(self, exchange: Exchange) -> None:
        """For sums of the backend's."""
        comm, parts, pending = self.comm, exchange.parts, exchange.pending
        exchange.received = [part.chunk(comm.rank) for part in parts]
        if comm.shm is not None:
            rows, accum = [part.by_rank() for part in parts], self.dtypes.accum
            events.offer(sum([sum([each.nbytes for each in row]) - row[comm.rank].nbytes for row in rows]))
            exchange.received = [o if o.dtype == accum else torch.empty_like(o, dtype=accum) for o in exchange.received]
            pending.incoming = [comm.shm.reduce_scatter(exchange.received, rows)]
        elif self._is_one_call(exchange.label):
            pending.incoming = [comm.group.allreduce([part.tensor]) for part in parts]
        else:
            evened = [Evened(part) for part in parts]
            for each in evened:
                each.copy()
            outputs, inputs = [each.part.chunk(comm.rank) for each in evened], [each.part.tensor for each in evened]
            pending.incoming = [comm.group.reduce_scatter_tensor_coalesced(outputs, inputs)]
            pending.finish = [partial(each.copy, comm.rank, back=True) for each in evened if each.is_copy]


def _messages(parts: Sequence[Part]) -> Sequence[Part]:
    """Several parts that are worth a copy as one, rank by rank; the same on all ranks."""
    num_bytes = sum([sum(part.cut.sizes) * part.tensor.itemsize for part in parts])
    if len(parts) == 1 or num_bytes > PACKED_BYTES[is_queued(parts[0].tensor.device)]:
        return parts
    size, evened = len(parts[0].cut.spans), [Evened(part) for part in parts]
    for each in evened:
        each.copy()
    rows = [each.part.tensor.view(size, each.part.cut.longest) for each in evened]  # one view, however many ranks
    return [Part.evenly(torch.cat(rows, dim=1).view(-1), size)]
