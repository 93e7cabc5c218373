"""Intervals against distributions whose truth is known; small statistics against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness.bench.stats import LEAST_BLOCKS, Interval, median_ratio, spread

DRIFT, NOISE = 0.05, 0.03
"""Standard deviations of the logarithm: of a block, shared by its arms, and of one process."""


def simulate(rng: np.random.Generator, blocks: int, speeds: list[float]) -> list[list[float]]:
    """Medians of one arm each, [arms][blocks]."""
    drift = np.exp(DRIFT * rng.standard_normal(blocks))
    return [(speed * drift * np.exp(NOISE * rng.standard_normal(blocks))).tolist() for speed in speeds]


@pytest.mark.parametrize(("blocks", "least"), [(3, 0.68), (5, 0.90), (8, 0.92)], ids=["75 %", "93.75 %", "95 %"])
def test_intervals_cover_the_truth(blocks: int, least: float) -> None:
    """Blocks, the least share of intervals that hold the true ratio, and what they cover at most."""
    rng, covered, trials = np.random.default_rng(1), 0, 300
    for _ in range(trials):
        interval = median_ratio(*simulate(rng, blocks, [1.1, 1.0]))
        assert interval is not None
        covered += interval.low <= 1.1 <= interval.high
    assert covered / trials >= least


def test_pairing_takes_out_what_a_block_shares() -> None:
    rng = np.random.default_rng(0)
    mine, other = simulate(rng, 5, [1.0, 1.0])
    paired = median_ratio(mine, other)
    shuffled = [median_ratio(mine, list(row)) for row in itertools.permutations(other)]
    widths = [interval.high / interval.low for interval in shuffled if interval is not None]
    assert paired is not None
    assert paired.high / paired.low < float(np.median(widths))


def test_equal_times_are_not_told_apart_and_scaled_ones_scale() -> None:
    times = [1.0, 1.3, 0.9, 1.1, 1.2]
    same = median_ratio(times, times)
    assert same == Interval(1.0, 1.0, 1.0, 5)
    assert same.includes_one
    rng = np.random.default_rng(3)
    mine, other = simulate(rng, 6, [1.0, 1.0])
    once, twice = median_ratio(mine, other), median_ratio([2 * t for t in mine], other)
    assert once is not None
    assert twice is not None
    assert (twice.low, twice.value, twice.high) == pytest.approx((2 * once.low, 2 * once.value, 2 * once.high))


def test_few_blocks_have_no_interval_and_say_what_they_can_cover_and_unequal_ones_are_refused() -> None:
    assert median_ratio([1.0] * (LEAST_BLOCKS - 1), [1.0] * (LEAST_BLOCKS - 1)) is None
    assert [Interval(1, 1, 1, n).most_coverage for n in (3, 5, 6)] == [0.75, 0.9375, 0.95]
    with pytest.raises(ValueError, match="blocks"):
        median_ratio([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0], [2.0, 8.0, 1.0, 9.0, 4.0, 4.0]])
def test_a_spread_is_numpy_s_distance_of_quartiles(values: list[float]) -> None:
    assert spread(values) == pytest.approx(np.subtract(*np.quantile(values, [0.75, 0.25])))
