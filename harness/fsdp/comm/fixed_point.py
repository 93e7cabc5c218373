"""Sums of gradients and of squares that do not depend on their order: both add integers.

[Note: Exact sums] Under numerics=exact each microbatch's gradient is rounded once, to a multiple of 2^-bits. From then
on only integers are added: over microbatches, ranks and axes, in any order and grouping, with one result. Once a step
the sum becomes a floating-point number again, divided and rounded once. So the gradient has the same bits under every
strategy, number of ranks, hybrid shape and bucket size. Splits into microbatches of one size change none either.

The price: 8 bytes an element on the wire and in the sums; an absolute resolution (an element far below 2^-bits is
lost); and a largest value, 2^(62 - bits) / terms, beyond which all ranks refuse the step.

A sum of squares is four integers, each a sum of 32-bit limbs of x^2 in units of 2^-74. Squares of fp32 values are exact
in fp64; a remainder below 2^-74 (|x| < 2^-37) is rounded to the nearest unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.options import OPTIONS, Options

RANGE_BITS = 62  # one less than an int64 has: a sum of numbers within the limit cannot wrap
_BLOCK = 1 << 16  # elements converted at a time: they stay in cache
_UNIT = 74
_LIMB = 32
_LIMIT = 2.0**26  # largest |x|: its square has 126 bits in units of 2^-74, so that every limb fits 2^31 elements
_NUM_LIMBS = 4
NUM_COUNTERS = _NUM_LIMBS + 2  # limbs from the highest, elements beyond the limit, elements that are not finite
_NORM_BLOCK = 1 << 20
_QUEUED_BLOCK = 1 << 23


@dataclass(frozen=True)
class FixedPoint:
    """int64 integers in units of 2^-bits, 0 to 60; terms: the largest number of addends of a sum. Raises ValueError: a
    value is out of its range, or there is no room for a gradient of 1."""

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
    step = max(1, flat.numel()) if is_queued(flat.device) else _BLOCK
    for begin in range(0, flat.numel(), step):
        yield begin, min(begin + step, flat.numel())


# -- norms ------------------------------------------------------------------------------------------------------------


def square_counters(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """int64, shape [6]; they add over tensors of any shape, and over ranks."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    for tensor in tensors:
        for block in tensor.reshape(-1).split(_QUEUED_BLOCK if is_queued(tensor.device) else _NORM_BLOCK):
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
