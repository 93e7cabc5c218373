"""Gather and reduce under a dtype policy, on any backend.

[Note: Four verbs] A reduction turns the unreduced gradients of a bucket into this rank's share of their sum. It is one
object with four verbs: *encode* (gradient to wire), *exchange* (issue the traffic), *fold* (wire into the sums, made in
the accumulate dtype) and *finish* (sums to main gradients, scaled once). What a gradient is on the way (a
floating-point number or an integer) is said in `harness.fsdp.comm.gradient_format`, how sums are made by the classes
below; the pipelines never ask which one they hold.

[Note: Own exchange] Where a backend would sum in the wire dtype, or in an order of its own, contributions are sent to
the rank that owns them and summed there in rank order. On gloo this is always so: its reduce-scatter is an all-reduce
inside (twice the bytes) and sums 16-bit wires in 16 bits. There, contributions travel by send and receive in pieces,
two pieces in flight, each summed as it arrives, so that no second bucket is needed. The tag of a message names its
model, kind and bucket, so that ranks which issue collectives in different orders wait for each other (and time out)
instead of taking one bucket for another; messages of one tag between two ranks keep their order. Where ranks share a
host, what is long is read from the sender's memory instead (see [Note: Reads instead of messages]).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.gradient_format import Floating, Numbers
from harness.fsdp.comm.parts import Evened, Part, joined, packed, worth_packing
from harness.fsdp.comm.peer_memory import Laid
from harness.fsdp.comm.together import add_together, copy_together, scale_together
from harness.fsdp.policy import Dtypes
from harness.fsdp.vocabulary import Numerics

PIECE_BYTES = 4 << 20
PACKED_BYTES = 32 << 20
"""A bucket of at most so many bytes is sent as one message where work is queued: copying that takes some 20 us on a
GPU, about what giving it another message takes the host."""
FOLD_BLOCK = 1 << 16


@dataclass
class Exchange:
    """Traffic of one reduction between `exchange` and `fold`.

    parts: the encoded gradients, cut by owner. label: which bucket. factor: what the sums are multiplied with where no
    later one is added to them; 1 leaves that to `finish`.
    """

    parts: list[Part]
    label: Label
    factor: float = 1.0
    pending: Pending = field(default_factory=lambda: Pending([]))
    received: list[Tensor] = field(default_factory=list)
    evened: list[Evened] = field(default_factory=list)
    laid: list[Laid] = field(default_factory=list)

    def is_there(self) -> bool:
        """True if all contributions are known to lie where they can be read, so that folding them waits for nobody."""
        return bool(self.laid) and all(laid.is_there() for laid in self.laid)


class Reduction(ABC):
    """One way to sum gradients over the ranks of an axis; see [Note: Four verbs]."""

    def __init__(
        self, comm: Communicator, dtypes: Dtypes, numbers: Numbers | None = None, *, legs_apart: bool = False
    ) -> None:
        self.comm = comm
        self.dtypes = dtypes
        self.numbers: Numbers = numbers or Floating(dtypes)
        self.legs_apart = legs_apart

    def encode(self, gradients: Tensor) -> Tensor:
        """Gradients, or sums of them, as they are sent: the same tensor where they already are."""
        return self.numbers.encode(gradients)

    @abstractmethod
    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        """Issue the traffic that brings contributions to their owners. The parts belong to the result until folded."""

    @abstractmethod
    def fold(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        """Sum this rank's chunks of all contributions and copy them (or `add` them) to `into`, one tensor a part.

        `into` may be this rank's own chunks of the parts themselves. Peers may still have to take what the parts hold
        for them; `exchange.pending` tells when they have.
        """

    def spread(self, exchange: Exchange, whole: Sequence[Part]) -> Pending:
        """Second leg of an all-reduce, after `fold`: give every rank the whole sums, cut as they were made."""
        return self.comm.second_leg(whole, exchange.label)

    def finish(self, sums: Sequence[Tensor], main: Sequence[Tensor], factor: float) -> None:
        """Turn sums into main gradients (the same tensors, or others), scaled: once a step."""
        self.numbers.finish(sums, main, factor)


class PeerReduction(Reduction):
    """Own exchange by messages or reads, summed in rank order; see [Note: Own exchange]. For gloo."""

    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        comm = self.comm
        exchange = Exchange(parts, label, factor)
        if comm.size == 1:
            return exchange
        if comm.reads(parts):
            self._lay_out(exchange)
            return exchange
        if worth_packing(parts):
            exchange.parts = [packed(parts, range(comm.size))]
        with events.begin(label, parts):
            tag = comm.tag(label)
            for step in range(1, comm.size):
                peer = (comm.rank + step) % comm.size
                for part in exchange.parts:
                    for piece in self._pieces(part.chunk(peer)):
                        exchange.pending.outgoing += comm.send(piece, peer, tag)
        return exchange

    def _lay_out(self, exchange: Exchange) -> None:
        comm, parts = self.comm, exchange.parts
        with events.begin(exchange.label, exchange.parts):
            tag = comm.tag(exchange.label)
            exchange.pending = comm.offer([(peer, [part.chunk(peer) for part in parts]) for peer in comm.others], tag)
            exchange.laid = [comm.laid_by(peer, tag) for peer in comm.others]

    def fold(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        if self.comm.size == 1:
            for part, target in zip(exchange.parts, into, strict=True):
                _sum_in_order([part.chunk(0)], target, self.dtypes.accum, add=add, factor=exchange.factor)
            return
        if exchange.laid:
            self._fold_reads(exchange, into, add=add)
            return
        if len(exchange.parts) == len(into):
            self._fold(exchange, into, exchange.factor, add=add)
            return
        total = exchange.parts[0].chunk(self.comm.rank).to(self.dtypes.accum, copy=True)
        self._fold(exchange, [total], 1.0, add=False)
        for target, summed in zip(into, total.split([each.numel() for each in into]), strict=True):
            (target.add_ if add else target.copy_)(summed)
        scale_together(into, exchange.factor)

    def _fold(self, exchange: Exchange, into: list[Tensor], factor: float, *, add: bool) -> None:
        todo = [
            (own, target)
            for part, whole in zip(exchange.parts, into, strict=True)
            for own, target in zip(self._pieces(part.chunk(self.comm.rank)), self._pieces(whole), strict=True)
        ]
        tag = self.comm.tag(exchange.label)
        with events.resume(exchange.label):
            ahead = [self._post(own, tag, index) for index, (own, _) in enumerate(todo[:2])]
            for index, (own, target) in enumerate(todo):
                buffers, works = ahead[index]
                for work in works:
                    events.wait_for(work)
                buffers[self.comm.rank] = own
                _sum_in_order(buffers, target, self.dtypes.accum, add=add, factor=factor)
                ahead[index] = ([], [])
                if index + 2 < len(todo):
                    ahead.append(self._post(todo[index + 2][0], tag, index))

    def _fold_reads(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        comm = self.comm
        for index, (part, target) in enumerate(zip(exchange.parts, into, strict=True)):
            own = part.chunk(comm.rank)
            for begin in range(0, own.numel(), FOLD_BLOCK):
                blocks = [own[begin : begin + FOLD_BLOCK]] * comm.size
                for laid in exchange.laid:
                    block = blocks[laid.peer] = comm.scratch((0, laid.peer), blocks[comm.rank])
                    laid.read(index, block, begin * own.itemsize)
                summed = target[begin : begin + FOLD_BLOCK]
                _sum_in_order(blocks, summed, self.dtypes.accum, add=add, factor=exchange.factor)
        for laid in exchange.laid:
            laid.finish()

    def _post(self, own: Tensor, tag: int, index: int) -> tuple[list[Tensor], list[Any]]:
        """Start receiving every peer's contribution to one piece; pieces of even and odd index share buffers."""
        comm = self.comm
        buffers = [own if rank == comm.rank else comm.scratch((index % 2, rank), own) for rank in range(comm.size)]
        works = [w for rank in range(comm.size) if rank != comm.rank for w in comm.receive(buffers[rank], rank, tag)]
        return buffers, works

    def _pieces(self, chunk: Tensor) -> Sequence[Tensor]:
        peers = max(1, self.comm.size - 1)
        longest = max(1, PIECE_BYTES // (peers * self.dtypes.wire.itemsize))
        if chunk.numel() <= longest:
            return (chunk,) if chunk.numel() else ()
        pieces: Sequence[Tensor] = chunk.split(longest)
        return pieces


class ExchangeReduction(Reduction):
    """Own exchange by all-to-all, summed in the accumulate dtype. For NCCL, which may sum in the wire dtype.

    in_order: sums are made in rank order, one contribution after the other, so that bits do not depend on the layout;
    else in one operation, in whichever order that has. Small buckets travel as one message (see `PACKED_BYTES`).
    """

    in_order = True

    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        comm = self.comm
        exchange = Exchange(parts, label, factor)
        if comm.size == 1:
            return exchange
        with events.begin(label, parts):
            for part in [_rank_by_rank(parts)] if _is_small(parts) else parts:
                own = part.sizes[comm.rank]
                received = part.tensor.new_empty(own * comm.size)
                work = comm.group.alltoall_base(received, part.closed_up, [own] * comm.size, part.sizes)
                exchange.received.append(received)
                exchange.pending.incoming.append(work)
        return exchange

    def fold(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        exchange.pending.wait()
        if self.comm.size == 1:
            exchange.received = [part.chunk(0) for part in exchange.parts]
        size = self.comm.size
        rows = [received.view(size, received.numel() // size) for received in exchange.received]
        exchange.received = []
        lengths = [target.numel() for target in into]
        came_as_one = len(rows) < len(into)
        widths = [part.cut.longest for part in exchange.parts] if Evened.fits(exchange.parts) else lengths
        if self.in_order:
            for received, target in zip(rows[0].split(widths, 1) if came_as_one else rows, into, strict=True):
                own = list(received[:, : target.numel()])
                _sum_in_order(own, target, self.dtypes.accum, add=add, factor=exchange.factor)
            return
        totals = [received.sum(dim=0, dtype=self.dtypes.accum) for received in rows]
        if came_as_one:
            totals = [total[:length] for total, length in zip(totals[0].split(widths), lengths, strict=True)]
        (add_together if add else copy_together)(into, totals)
        scale_together(into, exchange.factor)


class NativeReduction(Reduction):
    """The backend's own reduce-scatter and all-reduce: NCCL's, where the wire has the sum's dtype (fp32, fp64, int64).

    Where an outer reduction comes between the two legs of an all-reduce, it is made of a reduce-scatter and an
    all-gather; else it is the backend's own, which a switch may make (NVLS, SHARP).
    """

    def _is_one_call(self, label: Label) -> bool:
        return label.kind == "all_reduce" and not self.legs_apart

    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        comm = self.comm
        exchange = Exchange(parts, label, factor)
        if comm.size == 1:
            return exchange
        with events.begin(label, parts):
            if self._is_one_call(label):
                exchange.pending.incoming = [comm.group.allreduce([part.tensor]) for part in parts]
                return exchange
            evened = Evened.all_of(parts)
            if evened is None:
                pairs = [(part.chunk(comm.rank), [part.chunk(rank) for rank in range(comm.size)]) for part in parts]
                exchange.pending.incoming = [comm.group.reduce_scatter([own], [chunks]) for own, chunks in pairs]
                return exchange
            for each in evened:
                each.copy_in()
            outputs, inputs = [each.part.chunk(comm.rank) for each in evened], [each.part.tensor for each in evened]
            exchange.pending.incoming = [comm.group.reduce_scatter_tensor_coalesced(outputs, inputs)]
            exchange.evened = evened
        return exchange

    def fold(self, exchange: Exchange, into: list[Tensor], *, add: bool) -> None:
        exchange.pending.wait()
        if self._is_one_call(exchange.label):
            return
        for each in exchange.evened:
            each.copy_back(self.comm.rank)
        exchange.evened = []
        own = [part.chunk(self.comm.rank) for part in exchange.parts]
        if add:
            add_together(into, own)
        else:
            copy_together(into, own)
        scale_together(into, exchange.factor)

    def spread(self, exchange: Exchange, whole: Sequence[Part]) -> Pending:
        if not self._is_one_call(exchange.label):
            return super().spread(exchange, whole)
        targets = [part.tensor for part in whole]
        copy_together(targets, [part.tensor for part in exchange.parts])
        scale_together(targets, exchange.factor)
        return Pending([])


def make_reduction(
    comm: Communicator, dtypes: Dtypes, numerics: Numerics, numbers: Numbers | None = None, *, legs_apart: bool = False
) -> Reduction:
    """Choose how sums are made for one group, dtype policy and promise.

    Args:
        numbers: what gradients are on the way; None: floating-point numbers of `dtypes`.
        legs_apart: whether something comes between the two legs of an all-reduce.
    """
    kind: type[Reduction] = NativeReduction
    if comm.by_peers:
        kind = PeerReduction
    elif numerics is not Numerics.exact and (numerics.bitwise or not dtypes.sums_as_sent):
        kind = ExchangeReduction
    reduction = kind(comm, dtypes, numbers, legs_apart=legs_apart)
    if isinstance(reduction, ExchangeReduction):
        reduction.in_order = numerics.bitwise
    return reduction


def _is_small(parts: Sequence[Part]) -> bool:
    return len(parts) > 1 and sum(sum(part.sizes) * part.tensor.itemsize for part in parts) <= PACKED_BYTES


def _rank_by_rank(parts: Sequence[Part]) -> Part:
    size, evened = len(parts[0].sizes), Evened.all_of(parts)
    if evened is None:
        return Part(torch.cat([part.chunk(rank) for rank in range(size) for part in parts]), joined(parts))
    for each in evened:
        each.copy_in()
    rows = [each.part.tensor.view(size, each.part.cut.longest) for each in evened]  # one view, however many ranks
    return Part.evenly(torch.cat(rows, dim=1).view(-1), size)


def _sum_in_order(
    contributions: list[Tensor], target: Tensor, accum: torch.dtype, *, add: bool, factor: float = 1.0
) -> None:
    """target = (or +=) contributions[0] + contributions[1] + ..., summed in `accum` one by one; then *= factor.

    One of the contributions may lie where the target does.
    """
    if len(contributions) == 1 and torch.promote_types(contributions[0].dtype, accum) == accum:
        _take_over(contributions[0], target, add=add, factor=factor)
        return
    size = max(1, target.numel()) if is_queued(target.device) else FOLD_BLOCK
    for begin in range(0, target.numel(), size):
        end = min(begin + size, target.numel())
        blocks = [contribution[begin:end] for contribution in contributions]
        into = target[begin:end]
        if len(blocks) == 2 and not add and blocks[0].dtype == into.dtype == accum:
            torch.add(blocks[0], blocks[1], out=into)
        else:
            total = blocks[0].to(accum, copy=True)
            for block in blocks[1:]:
                total.add_(block if torch.promote_types(block.dtype, accum) == accum else block.to(accum))
            (into.add_ if add else into.copy_)(total)
        if factor != 1.0:
            into.mul_(factor)


def _take_over(contribution: Tensor, target: Tensor, *, add: bool, factor: float) -> None:
    """As `_sum_in_order`, of one contribution: nothing is summed, and the accumulate dtype has all its values."""
    if add:
        target.add_(contribution)
    elif target.data_ptr() != contribution.data_ptr():
        target.copy_(contribution)
    if factor != 1.0:
        target.mul_(factor)
