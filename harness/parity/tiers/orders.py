"""Noise of sums over microbatches and ranks, simulated: the same addends in every order that a backend may choose.

A ring starts each piece at another rank, a tree adds pairs of pairs, an exchange of all pieces adds in rank order. Each
order is simulated in the dtypes of the policy, against extended precision. The worst order counts, over addends that
are independent, that share a mean, and that are nearly equal: kept in 16 bits, sums of the latter stagnate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Round = Callable[[Array], Array]

ADDENDS = ((0.0, 1.0), (1.0, 1.0), (0.9, 0.02))
"""Mean and standard deviation: independent, sharing a mean, nearly equal."""

ELEMENTS = 1 << 16
"""Numbers drawn a simulation, over all addends; 64 sums at least."""


@lru_cache(maxsize=256)
def noise(ranks: int, microbatches: int, wire: str, accumulate: str, main: str) -> float:
    """Root-mean-square relative error of a step's gradient by its sums alone, in the worst order.

    Args: ranks: N, summed in `accumulate` after the wire. microbatches: k, added on each rank in sequence. main: dtype
    of the result.
    """
    ranks, microbatches = max(1, ranks), max(1, microbatches)
    of_microbatches = _worst(microbatches, main, main, main, ("in order",))
    # Who adds in another dtype than the wire's adds whole contributions as they arrive; partial sums do not travel.
    orders = tuple(ORDERS) if accumulate == wire else ("in order",)
    of_ranks = _worst(ranks, wire, accumulate, main, orders) if ranks > 1 else 0.0
    return math.hypot(of_microbatches, of_ranks)


def _worst(count: int, wire: str, accumulate: str, main: str, orders: tuple[str, ...]) -> float:
    return max(error(order, count, wire, accumulate, main, *addends) for order in orders for addends in ADDENDS)


def error(order: str, count: int, wire: str, accumulate: str, main: str, mean: float, deviation: float) -> float:
    """Root-mean-square relative error of a mean of `count` addends in one of `ORDERS`.

    Args: wire: dtype of sent addends, and of partial sums in a ring or tree. accumulate: dtype of partial sums. main:
    dtype of addends and result. mean, deviation: of their normal distribution.
    """
    import numpy as np

    rng = np.random.default_rng(count)
    drawn = rng.standard_normal((count, max(64, ELEMENTS // count))) * deviation + mean
    addends = rounder(main)(drawn)
    exact = addends.astype(np.longdouble).sum(0) / count
    kept, sent = rounder(accumulate), rounder(wire)
    total = ORDERS[order](sent(addends), kept, sent) if count > 1 else addends[0]
    off = rounder(main)(total / count).astype(np.longdouble) - exact
    return math.sqrt(float((off * off).sum() / (exact * exact).sum()))


def _in_order(addends: Array, kept: Round, sent: Round) -> Array:
    total = kept(addends[0])
    for addend in addends[1:]:
        total = kept(total + addend)
    return total


def _ring(addends: Array, kept: Round, sent: Round) -> Array:
    import numpy as np

    count, size = addends.shape
    starts = np.arange(size) % count
    columns = np.arange(size)
    total = kept(addends[starts, columns])
    for hop in range(1, count):
        total = kept(sent(total) + addends[(starts + hop) % count, columns])
    return total


def _tree(addends: Array, kept: Round, sent: Round) -> Array:
    import numpy as np

    level = kept(addends)
    while len(level) > 1:
        even = level[: len(level) // 2 * 2]
        summed = kept(even[0::2] + sent(even[1::2]))
        level = np.concatenate([summed, level[len(even) :]])
    total: Array = level[0]
    return total


ORDERS: dict[str, Callable[[Array, Round, Round], Array]] = {"in order": _in_order, "ring": _ring, "tree": _tree}


def rounder(dtype: str) -> Round:
    """Rounding to a dtype, as float64."""
    import numpy as np

    if dtype == "bf16":
        return _bf16
    kind = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}[dtype]
    return lambda values: values.astype(kind).astype(np.float64)


def _bf16(values: Array) -> Array:
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
