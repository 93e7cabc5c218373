"""Ratios of step times over blocks, with intervals.

The unit is the process: its steps share memory layout, placement and minute, so their median stands for it. A block
holds one process of every arm. An interval is a percentile bootstrap of the ratio of medians over whole blocks,
exhaustive (n**n draws) for up to 5 blocks.

[Note: Few blocks] The interval of a median over n blocks covers at most 1 - 2 * 0.5**n: 75 % for 3, 93.75 % for 5, more
than 95 % from 6 on. Reports say so.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
LEAST_BLOCKS = 3
EXHAUSTIVE_BLOCKS = 5
DRAWS = 20_000
SEED = 20_011


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float
    blocks: int

    @property
    def includes_one(self) -> bool:
        return self.low <= 1.0 <= self.high

    @property
    def most_coverage(self) -> float:
        """Largest coverage that an interval of so few blocks can reach, at most the nominal `CONFIDENCE`."""
        return min(CONFIDENCE, 1.0 - 2.0 * 0.5**self.blocks)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> Interval | None:
    """Median of one arm's times over that of another's, paired by block.

    Args: times, others: seconds, one a block.

    Returns None with fewer than `LEAST_BLOCKS` blocks. Raises `ValueError`: the two have other numbers of blocks.
    """
    import numpy as np

    count = len(times)
    if len(others) != count:
        raise ValueError(f"{count} blocks of one arm, and {len(others)} of the other")
    if count < LEAST_BLOCKS:
        return None
    mine, theirs = np.asarray(times, float), np.asarray(others, float)
    draws = np.random.default_rng(SEED).integers(0, count, size=(DRAWS, count))  # indices of blocks, [draws, blocks]
    if count <= EXHAUSTIVE_BLOCKS:
        draws = np.array(list(itertools.product(range(count), repeat=count)))
    ratios = np.median(mine[draws], axis=-1) / np.median(theirs[draws], axis=-1)  # [draws]
    tail = (1.0 - CONFIDENCE) / 2.0
    # Not interpolated: with few blocks the ratios are few, and both ends are ratios that occurred.
    low, high = np.quantile(ratios, tail, method="lower"), np.quantile(ratios, 1.0 - tail, method="higher")
    return Interval(float(np.median(mine) / np.median(theirs)), float(low), float(high), count)


def spread(values: Sequence[float]) -> float:
    """Interquartile range by linear interpolation; 0 of a single value."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (0.0, 0.0, 0.0)
    return high - low
