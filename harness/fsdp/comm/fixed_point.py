"""Gradients as integers: sums that do not depend on their order.

[Note: Exact sums] Under numerics=exact each microbatch's gradient is rounded once, to a multiple of 2^-bits, and from
then on only integers are added: over microbatches, ranks and axes, in any order and grouping, with the same result.
Once a step the sum becomes a floating-point number again, divided and rounded once. So the gradient has the same bits
under every strategy, number of ranks, hybrid shape, bucket size and split into microbatches of one size, and on one
process that sees the same microbatches.

The price: 8 bytes an element on the wire and in the sums; a resolution that is absolute (an element far below 2^-bits
is lost); and a largest value, 2^(62 - bits) / terms, beyond which the step is refused on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.order_free_norm import norm_from_counters, square_counters
from harness.fsdp.options import OPTIONS, Options
from harness.fsdp.vocabulary import Numerics

RANGE_BITS = 62
"""Bits of the largest sum: one less than an int64 has, so that a sum of numbers within the limit cannot wrap."""
_BLOCK = 1 << 16


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point format of gradients under numerics=exact: int64 integers in units of 2^-bits.

    Args:
        bits: resolution, 0 to 60.
        terms: the largest number of addends of a sum.

    Raises:
        ValueError: a value is out of its range, or there is no room for a gradient of 1.
    """

    bits: int = Options.exact_bits
    terms: int = Options.exact_terms

    def __post_init__(self) -> None:
        OPTIONS["exact_bits"].read(self.bits)
        if not 1 <= self.terms < 1 << RANGE_BITS - self.bits:
            most = (1 << RANGE_BITS - self.bits) - 1
            raise ValueError(
                f"exact_terms={self.terms} with exact_bits={self.bits} leaves no room for a gradient of 1;"
                f" exact_terms is 1 to {most}, or lower exact_bits"
            )

    @classmethod
    def asked_for(cls, options: Options) -> FixedPoint | None:
        """The format that options ask for with numerics=exact; None for other values of numerics.

        Raises:
            ValueError: no gradient of 1 would fit, with the largest `exact_terms`.
        """
        return cls(options.exact_bits, options.exact_terms) if options.numerics is Numerics.exact else None

    def overflow(self, count: int) -> OverflowError:
        """The error of a step with elements beyond the limit. count: blocks of them over all ranks."""
        return OverflowError(
            f"gradients beyond what numerics=exact can hold, or not finite, in {count} blocks over all ranks: with"
            f" exact_bits={self.bits} and exact_terms={self.terms} an element of one microbatch must stay below"
            f" {self.limit:g}. No weight was changed; lower exact_bits (each bit doubles the range), or find out why"
            " gradients are that large (report_nan_in_param_grad=True names the tensor of one that is not finite)"
        )

    @staticmethod
    def norm(tensors: Iterable[Tensor], device: torch.device, total: Callable[[Tensor], Tensor] = lambda x: x) -> float:
        """Euclidean norm over all elements, of the same bits whatever their order; see `order_free_norm`.

        total: adds int64 counters over the ranks that hold the rest, and returns the sum.
        """
        return norm_from_counters(total(square_counters(tensors, device)))

    @property
    def limit(self) -> float:
        """Every gradient element must be smaller than this in magnitude: 2^(62 - bits) / terms."""
        return math.ldexp(1.0, RANGE_BITS - self.bits) / self.terms

    def encode(self, gradient: Tensor, into: Tensor, beyond: Tensor, *, add: bool = False) -> None:
        """Round a flat gradient and copy it to (or `add` it to) `into`, an int64 tensor of the same length.

        `beyond` (int64, shape [1]) is increased by the number of blocks that have an element too large or NaN.
        """
        for begin, end in _blocks(gradient):
            units = gradient[begin:end].double().mul_(math.ldexp(1.0, self.bits))
            largest = units.abs().amax()  # NaN if there is one
            beyond += ~(largest < math.ldexp(self.limit, self.bits))
            rounded = units.round_().to(torch.int64)
            (into[begin:end].add_ if add else into[begin:end].copy_)(rounded)

    def decode(self, sums: Tensor, divisor: float, into: Tensor) -> None:
        """Divide flat sums and round them to the dtype of `into`, which is there when the device has come so far.

        The upper and the lower half are exact in fp64 and added there: one rounding, the same on every machine, however
        its vector units convert an int64.
        """
        for begin, end in _blocks(sums):
            block = sums[begin:end]
            value = (block >> 32).double().mul_(2.0**32).add_((block & 0xFFFFFFFF).double())
            into[begin:end].copy_(value.mul_(math.ldexp(1.0, -self.bits)).div_(divisor), non_blocking=True)


def _blocks(flat: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, flat.numel()) if is_queued(flat.device) else _BLOCK
    for begin in range(0, flat.numel(), step):
        yield begin, min(begin + step, flat.numel())
