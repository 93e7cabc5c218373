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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Evened, Part, Pending
from harness.fsdp.comm.device import copy_together, is_queued, scale_together
from harness.fsdp.comm.events import Label
from harness.fsdp.options import OPTIONS, Numerics, Options
from harness.fsdp.policy import Dtypes
from harness.private_torch import foreach_add_
from harness.shm import sum_in_order
from harness.shm.transfer import BLOCK

RANGE_BITS = 62  # one less than an int64 has: a sum of numbers within the limit cannot wrap
_UNIT = 74
_LIMB = 32
_LIMIT = 2.0**26  # largest |x|: its square has 126 bits in units of 2^-74, so that every limb fits 2^31 elements
_NUM_LIMBS = 4
NUM_COUNTERS = _NUM_LIMBS + 2  # limbs from the highest, elements beyond the limit, elements that are not finite


@dataclass(frozen=True)
class FixedPoint:
    """int64 integers in units of 2^-bits, 0 to 60; terms: the largest number of addends of a sum. Raises ValueError: a
    value is out of its range, or there is no room for a gradient of 1.

    Sums of gradients and of squares that do not depend on their order: both add integers.

    [Note: Exact sums] Under numerics=exact each microbatch's gradient is rounded once, to a multiple of 2^-bits. From
    then on only integers are added: over microbatches, ranks and axes, in any order and grouping, with one result. Once
    a step the sum becomes a floating-point number again, divided and rounded once. So the gradient has the same bits
    under every strategy, number of ranks, hybrid shape and bucket size. Splits into microbatches of one size change
    none either.

    The price: 8 bytes an element on the wire and in the sums; an absolute resolution (an element far below 2^-bits is
    lost); and a largest value, 2^(62 - bits) / terms, beyond which all ranks refuse the step.

    A sum of squares is four integers, each a sum of 32-bit limbs of x^2 in units of 2^-74. Squares of fp32 values are
    exact in fp64; a remainder below 2^-74 (|x| < 2^-37) is rounded to the nearest unit.
    """

    bits: int = Options.exact_bits
    terms: int = Options.exact_terms

    def __post_init__(self) -> None:
        OPTIONS["exact_bits"].read(self.bits)
        if not 1 <= self.terms < 1 << RANGE_BITS - self.bits:
            raise ValueError(
                f"exact_terms={self.terms} leaves no room for a gradient of 1: it is 1 to"
                f" {(1 << RANGE_BITS - self.bits) - 1} with exact_bits={self.bits}"
            )

    def overflow(self, count: int) -> OverflowError:
        return OverflowError(
            f"gradients beyond what numerics=exact can hold, or not finite, in {count} blocks over all ranks: with"
            f" exact_bits={self.bits} and exact_terms={self.terms} an element of one microbatch must stay below"
            f" {self.limit:g}. No weight was changed; lower exact_bits, or see report_nan_in_param_grad=True"
        )

    @staticmethod
    def norm(tensors: Iterable[Tensor], device: torch.device, total: Callable[[Tensor], Tensor] = lambda x: x) -> float:
        """Euclidean norm, of the same bits in any order. total: sums int64 counters over ranks."""
        return norm_from_counters(total(square_counters(tensors, device)))

    @property
    def limit(self) -> float:
        return math.ldexp(1.0, RANGE_BITS - self.bits) / self.terms

    def encode(self, gradient: Tensor, into: Tensor, beyond: Tensor, *, add: bool = False) -> None:
        """Round a flat gradient into an int64 tensor of its length. beyond: int64, [1], counts blocks out of range."""
        for begin, end in _blocks(gradient):
            units = gradient[begin:end].double().mul_(math.ldexp(1.0, self.bits))
            largest = units.abs().amax()  # NaN if there is one
            beyond += ~(largest < math.ldexp(self.limit, self.bits))
            rounded = units.round_().to(torch.int64)
            (into[begin:end].add_ if add else into[begin:end].copy_)(rounded)

    def decode(self, sums: Tensor, divisor: float, into: Tensor) -> None:
        """Divide sums and round them to the dtype of `into`, which is there once the device has come so far.

        Both halves are exact in fp64 and added there: one rounding on every machine.
        """
        for begin, end in _blocks(sums):
            block = sums[begin:end]
            value = (block >> 32).double().mul_(2.0**32).add_((block & 0xFFFFFFFF).double())
            into[begin:end].copy_(value.mul_(math.ldexp(1.0, -self.bits)).div_(divisor), non_blocking=True)


def _blocks(flat: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, flat.numel()) if is_queued(flat.device) else BLOCK
    for begin in range(0, flat.numel(), step):
        yield begin, min(begin + step, flat.numel())


# -- norms ------------------------------------------------------------------------------------------------------------


def square_counters(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """int64, shape [6]; they add over tensors of any shape, and over ranks."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    for tensor in tensors:
        for block in tensor.reshape(-1).split(1 << (23 if is_queued(tensor.device) else 20)):
            counters += _block_counters(block)
    return counters


def _block_counters(block: Tensor) -> Tensor:
    wide = block.double()
    finite = wide.isfinite()
    large = finite & (wide.abs() >= _LIMIT)
    units = torch.where(finite & ~large, wide * wide, 0.0) * 2.0**_UNIT
    sums = []
    for place in range(_NUM_LIMBS - 1, 0, -1):
        limb = torch.floor(units * 2.0 ** (-place * _LIMB))
        units -= limb * 2.0 ** (place * _LIMB)  # exact: only leading bits are taken away
        sums.append(limb.to(torch.int64).sum())
    return torch.stack([*sums, units.round().to(torch.int64).sum(), large.sum(), (~finite).sum()])


def norm_from_counters(counters: Tensor) -> float:
    """NaN if any element was not finite. Raises OverflowError for an element beyond the resolution."""
    *limbs, large, non_finite = (int(value) for value in counters.tolist())
    if non_finite:
        return math.nan
    if large:
        raise OverflowError(
            f"{large} gradient elements exceed 2^26, which a norm in any order holds; use numerics=fast"
        )
    total = sum(limb << (_LIMB * place) for place, limb in enumerate(reversed(limbs)))
    return math.sqrt(total / 2**_UNIT)


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
        self.is_native = comm.shm is not None or not (comm.is_gloo or sums_otherwise)
        self.in_order = numerics.bitwise or comm.is_gloo

    def exchange(self, parts: list[Part], label: Label, factor: float = 1.0) -> Exchange:
        """Issue the traffic that brings contributions to their owners. The parts belong to the result until folded."""
        exchange = Exchange(parts, label, factor)
        if self.comm.size == 1:
            exchange.received = [part.chunk(0) for part in parts]
        else:
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
        apart = self.legs_apart or self.comm.shm is not None or not self.is_native or self.comm.size == 1
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
            outputs, inputs = [each.part.chunk(comm.rank) for each in evened], [each.part.tensor for each in evened]
            pending.incoming = [comm.group.reduce_scatter_tensor_coalesced(outputs, inputs)]
            pending.finish = [partial(each.copy, comm.rank, back=True) for each in evened if each.is_copy]


def _messages(parts: Sequence[Part]) -> Sequence[Part]:
    """Several parts that are worth a copy as one, rank by rank; the same on all ranks."""
    num_bytes = sum([sum(part.cut.sizes) * part.tensor.itemsize for part in parts])
    if len(parts) == 1 or num_bytes > PACKED_BYTES[is_queued(parts[0].tensor.device)]:
        return parts
    size, evened = len(parts[0].cut.spans), [Evened(part) for part in parts]
    rows = [each.part.tensor.view(size, each.part.cut.longest) for each in evened]  # one view, however many ranks
    return [Part.evenly(torch.cat(rows, dim=1).view(-1), size)]
