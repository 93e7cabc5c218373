"""The numbers of a step, from what ranks have added up."""

from __future__ import annotations

import math

import pytest
import torch

from harness.config.roundoff import FINEST
from harness.fsdp.vocabulary import Numerics
from harness.probe.step_checks.sketch import SKETCHES, Sketch
from harness.probe.step_checks.table import LargestTable, Looked, SummedTable, step_numbers
from harness.store.check_stream import step_columns
from harness.train.step_checks import integer_floor
from tests.support.factory import small_config

M = SKETCHES


def sum_of(microbatches: int, alike: float, factor: float, least: float = 0.0) -> float:
    """The column `sum` where so many local gradients of norm 1 were added, whose sum is so much of what equal ones
    would have, and the engine's is times a factor off it."""
    summed, largest = SummedTable(1), LargestTable(1)
    total = alike * microbatches
    values = torch.full((1, M), total, dtype=torch.float64)
    summed["local"][:] = values
    summed["terms"][:] = float(microbatches)
    summed["saw"][:] = 1.0
    mean = values * factor / microbatches
    summed.put("reduced", Sketch(mean, mean[:, 0] ** 2))
    row, _ = step_numbers(summed, largest, Looked(True, True, False, False, False), microbatches, alike, least)
    return row[step_columns(M).index("sum")]


@pytest.mark.parametrize("microbatches", [1, 16, 1024])
def test_a_sum_of_equal_gradients_is_held_to_its_own_norm(microbatches: int) -> None:
    """Rounding errs by a share of the sum. Held to the norm of its terms, which is sqrt(M) times shorter, a clean sum
    of 1,024 microbatches would be off by 32 times that share."""
    assert sum_of(microbatches, 1.0, 1 + 1e-6) == pytest.approx(1e-6, rel=1e-3)


def test_what_cancels_is_held_to_its_terms() -> None:
    assert sum_of(1024, 1e-3, 2.0) == pytest.approx(1e-3 * math.sqrt(1024), rel=1e-6)


def test_what_integers_cannot_hold_of_a_tiny_gradient_is_told_of_a_larger_one() -> None:
    """A clean run under numerics=exact was DIFFERENT: its gradients were of a size with the integers' resolution."""
    config = small_config(numerics__mode=Numerics.exact, train__global_batch_size=8, train__microbatch_size=2)
    (floor,) = integer_floor(config, [(32, 32)])
    generator = torch.Generator().manual_seed(0)
    unit = 2.0**-config.numerics.exact_bits
    local = torch.rand(4, 32, 32, dtype=torch.float64, generator=generator) * 1000 * unit
    lost = float(((local / unit).round().sum(0) * unit / 4 - local.mean(0)).norm())
    assert lost / floor == pytest.approx(FINEST, rel=0.1)
    assert sum_of(4, 1.0, 1 + 1e-6, least=100.0) == pytest.approx(1e-8, rel=1e-3)
    assert integer_floor(small_config(), [(32, 32)]) == 0.0


def test_a_sum_that_is_lost_or_far_too_long_is_no_sum() -> None:
    assert sum_of(1024, 1.0, 0.0) == pytest.approx(math.sqrt(1024))
    assert sum_of(1024, 1.0, 1e6) == pytest.approx(1.0, rel=1e-5)
