"""Sums that do not depend on their order.

A sum of squares is split into four integers, each a sum of 32-bit limbs of x^2 in units of 2^-74. Integer sums are
associative, so the norm has the same bits however elements are dealt to ranks. Squares of fp32 values are exact in
fp64; what lies below 2^-74 (|x| < 2^-37) is rounded to the nearest unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued

_UNIT = 74
_LIMB = 32
_LIMIT = 2.0**26
"""Largest |x|: its square has 126 bits in units of 2^-74, so the top limb, like the others, fits 2^31 elements."""
_NUM_LIMBS = 4
NUM_COUNTERS = _NUM_LIMBS + 2
"""The limbs from the highest, the number of elements beyond the limit, the number of non-finite ones."""
_BLOCK = 1 << 20
_QUEUED_BLOCK = 1 << 23
"""Elements counted at a time where work is queued: 45 launches, and some 400 MB. The counters are those of any other
length."""


def square_counters(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Counters of the sum of squares over tensors of any shape: int64, shape [6]; they add over ranks."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    for tensor in tensors:
        for block in tensor.reshape(-1).split(_QUEUED_BLOCK if is_queued(tensor.device) else _BLOCK):
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
    """The Euclidean norm that summed counters stand for; NaN if any element was not finite.

    Raises:
        OverflowError: an element was too large for the fixed resolution.
    """
    *limbs, large, non_finite = (int(value) for value in counters.tolist())
    if non_finite:
        return math.nan
    if large:
        raise OverflowError(
            f"{large} gradient elements exceed 2^26, beyond what the order-free norm of numerics=ordered can hold;"
            " use numerics=fast or find out why gradients are that large"
        )
    total = sum(limb << (_LIMB * place) for place, limb in enumerate(reversed(limbs)))
    return math.sqrt(total / 2**_UNIT)
