"""Range of bounds on growth, and observed growth of a pair.

After the first update a difference between two runs is multiplied step by step. In stable training the factor is small
(measured: 1.0 to 1.7); training that is hot, which may still train well, was seen to multiply differences by 600 in one
step (AdamW at 60 times its default rate). No run says beforehand which it is. Two things tell it afterwards:

    stable_until   the control's own record: a gradient norm that bursts, or a loss that climbs, is that of a run which
                   leaves stability. From `LEAD` steps before it on, a single pair without witnesses decides nothing.
    grown          the pair's own differences: what they have grown by in one step before, they may grow by again, twice
                   over. So a fault, which lifts a difference out of rounding at one blow, is told from chaos, which
                   climbs; and a pair that is seen to climb fast is allowed to climb fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

EXPECTED_GROWTH = 1.5
MOST_GROWTH = 3.0
UNSTABLE = 2.0
"""Ratio of a gradient norm to its past maximum that marks instability; one of SGD with momentum grew ninefold a step
then."""
CLIMB = 1.1
"""Ratio of a loss to its past minimum that marks instability, beyond the difference of batches (3 % at 256 tokens)."""
HOT_GROWTH = 25.0
"""Square of the largest growth a step (600) that clean pairs showed in hot training before loss or norm did."""
LEAD = 2
"""Steps by which differences grow before norm or loss do: they begin along the sharp direction as rounding."""


def stable_until(norms: Sequence[float | None], losses: Sequence[float | None] = ()) -> int:
    """Last step with valid bounds on growth, by a control's record.

    Args: norms, losses: by step; None where there is none.
    """
    bursts = [_first(norms, UNSTABLE, max), _first(losses, CLIMB, min)]
    first = min((step for step in bursts if step is not None), default=None)
    return len(norms) if first is None else max(1, first - LEAD)


def _first(values: Sequence[float | None], factor: float, extreme: Callable[[float, float], float]) -> int | None:
    before: float | None = None
    for step, value in enumerate(values, start=1):
        if value is None or not math.isfinite(value):
            continue
        if before is not None and value > factor * before > 0:
            return step
        before = value if before is None else extreme(before, value)
    return None


def growth(rate: float, step: int) -> float:
    """Growth at a later step of a difference made by the first update; 0 at step 1."""
    return 0.0 if step < 2 else math.exp(min(700.0, (step - 2) * math.log(rate)))


def growths(rate: float, steps: NDArray[np.int64]) -> Float64:
    import numpy as np

    exponents = np.minimum(700.0, (steps - 2) * math.log(rate))
    grown: Float64 = np.where(steps < 2, 0.0, np.exp(exponents))
    return grown


def grown(differences: Float64, floor: float, steps: NDArray[np.int64] | None = None) -> Float64:
    """Bound of each difference by the growth before it; 0 at the first.

    The largest so far, times the square of the largest factor of one step (`HOT_GROWTH` at least), for every step
    between. Args: differences: not negative; NaN counts as none. floor: rounding of one observation. steps: consecutive
    where None.
    """
    import numpy as np

    known = np.maximum(np.nan_to_num(differences, nan=0.0, posinf=0.0), floor)
    gaps = np.ones(len(known)) if steps is None else np.diff(steps, prepend=steps[:1] - 1)
    largest = np.maximum.accumulate(known)
    factors = np.ones_like(known)
    factors[1:] = (known[1:] / largest[:-1]) ** (1 / gaps[1:])
    fastest = np.maximum(HOT_GROWTH, np.maximum.accumulate(factors))
    result: Float64 = np.zeros_like(known)
    with np.errstate(over="ignore"):
        result[1:] = largest[:-1] * fastest[:-1] ** (2 * gaps[1:])
    return result
