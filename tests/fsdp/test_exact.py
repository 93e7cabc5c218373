"""The order-free norm: equal to fp64 wherever it answers, the same bits for any split, and loud beyond its range."""

from __future__ import annotations

import math

import pytest
import torch

from harness.fsdp.comm.fixed_point import norm_from_counters, square_counters

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "count"), [(2.0**25.9, 1 << 20), (2.0**16, 1 << 20), (0.3, 1000), (1e-9, 1000), (0.0, 3), (1.0, 0)]
)
def test_it_is_the_norm(value: float, count: int) -> None:
    counters = square_counters([torch.full((count,), value)], CPU)
    expected = float(torch.tensor(value).double()) * math.sqrt(count)
    resolution = 2.0**-75 / max(value * value, 2.0**-75)  # of a square: half a unit
    assert norm_from_counters(counters) == pytest.approx(expected, rel=1e-14 + resolution, abs=1e-30)


def test_counters_add_over_a_billion_large_elements() -> None:
    """As ranks do: the same counters, 2^10 times, stand for 2^30 elements."""
    counters = square_counters([torch.full((1 << 20,), 2.0**25.9)], CPU) * (1 << 10)
    assert norm_from_counters(counters) == pytest.approx(2.0**25.9 * 2.0**15, rel=1e-6)


def test_the_bits_do_not_depend_on_the_order_or_the_cut() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 5000)
    whole = square_counters([values], CPU)
    pieces = square_counters(list(values.flip(0).split(77)), CPU)
    assert torch.equal(whole, pieces)
    assert norm_from_counters(whole) == pytest.approx(values.double().norm().item(), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gives_nan(bad: float) -> None:
    assert math.isnan(norm_from_counters(square_counters([torch.tensor([1.0, bad, 2.0])], CPU)))


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(OverflowError, match="1 gradient elements exceed"):
        norm_from_counters(square_counters([torch.tensor([1.0, 2.0**27])], CPU))
