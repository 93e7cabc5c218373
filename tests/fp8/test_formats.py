"""Formats and scales against exact arithmetic, bit for bit; see tests/fp8/reference.py."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from harness.fp8.quantize import (
    E4M3,
    E5M2,
    WHOLE,
    Scaling,
    Tile,
    amax_grid,
    cast,
    exponent_above,
    largest,
    power_of,
    quantize,
    scales_of,
)
from tests.fp8 import reference
from tests.support.mutants import each_found_by

PAIRS = [(E4M3, reference.E4M3), (E5M2, reference.E5M2)]


def _hard_values(exact: reference.Exact) -> Tensor:
    """Every number of the format, every midpoint, their fp32 neighbours, and what is far outside."""
    numbers = [float(each) for each in exact.numbers]
    points = numbers + [(a + b) / 2 for a, b in pairwise(numbers)]
    points += [exact.numbers[-1] * 17 / 16, 1e5, 3e38, 1e-40, 2.0**-149, math.inf, math.nan]
    base = torch.tensor([float(each) for each in points])
    near = [torch.nextafter(base, torch.tensor(to)) for to in (-math.inf, math.inf)]
    found = torch.cat([base, *near])
    return torch.cat([found, -found])


@pytest.mark.parametrize(("format", "exact"), PAIRS)
def test_a_cast_is_the_nearest_number_of_the_format(format: torch.dtype, exact: reference.Exact) -> None:
    values = _hard_values(exact)
    expected = torch.tensor([exact.nearest(float(each)) for each in values])
    for size in (5, values.numel()):  # kernels of torch have a vector part and a rest
        found = torch.cat([cast(part, format).float() for part in values.split(size)])
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(found[expected == 0]), torch.signbit(values[expected == 0]))
    assert largest(format) == float(exact.numbers[-1])


def test_what_fp32_does_not_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="float64 cannot be quantized"):
        quantize(torch.zeros(2, 2, dtype=torch.float64), E4M3, WHOLE, Scaling.exact)


def test_exponents_are_the_least_power_not_below() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(300, generator=generator).abs() * 2.0 ** torch.randint(-125, 120, (300,), generator=generator)
    values = torch.cat([values, torch.tensor([0.0, 1.0, 2.0**-127, 2.0**-126, 1.5 * 2.0**-127, 2.0**-149, 3e38])])
    expected = [reference.power_above(Fraction(float(each))) for each in values]
    assert exponent_above(values).tolist() == [*expected[:-1], 254]  # 2^128 is none of the format: it saturates
    assert exponent_above(torch.tensor([math.inf, math.nan])).tolist() == [254, 255]
    every = torch.arange(255, dtype=torch.uint8)
    assert power_of(every).double().tolist() == [2.0 ** (each - 127) for each in range(255)]
    scales, inverses = scales_of(power_of(every) * largest(E4M3), E4M3, Scaling.exponent)
    held = inverses.isfinite() & (every > 0)
    assert torch.equal(scales[held] * inverses[held], torch.ones(int(held.sum())))
    assert scales[0] == 1
    assert torch.isnan(power_of(torch.tensor([255], dtype=torch.uint8))).all()


@pytest.mark.parametrize(("format", "exact"), PAIRS)
def test_a_scale_is_rounded_once(format: torch.dtype, exact: reference.Exact) -> None:
    amax = torch.rand(500, generator=torch.Generator().manual_seed(2)) * 100 + 1e-3
    scale, inverse = scales_of(amax, format, Scaling.exact)
    top = exact.numbers[-1]
    assert scale.tolist() == [reference.to_fp32(top / Fraction(float(each))) for each in amax]
    assert inverse.tolist() == [reference.to_fp32(1 / Fraction(float(each))) for each in scale]
    powers, _ = scales_of(amax, format, Scaling.power_of_two)
    for scale, each in zip(powers.tolist(), amax.tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert scale * each <= largest(format) < 2 * scale * each
    _, inverse = scales_of(amax, format, Scaling.exponent)
    for step, each in zip(inverse.tolist(), amax.tolist(), strict=True):
        assert math.frexp(step)[0] == 0.5
        assert each / step <= largest(format)


@pytest.mark.parametrize("scaling", Scaling)
def test_odd_tiles_are_defined(scaling: Scaling) -> None:
    values = torch.zeros(5, 4)
    values[1] = math.nan
    values[2] = torch.tensor([1.0, math.nan, -2.0, 0.0])
    values[3] = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    values[4] = 2.0**-149
    found = quantize(values, E4M3, Tile(1, None), scaling)
    back = found.dequantize()
    assert torch.equal(amax_grid(values, Tile(1, None)).flatten(), torch.tensor([0, 0, 2, math.inf, 2.0**-149]))
    assert torch.equal(back[0], torch.zeros(4)), "a tile of zeros"
    assert torch.isnan(back[1]).all(), "a tile of NaN"
    assert torch.isnan(back[2, 1]), "NaN among numbers stays NaN"
    assert torch.isfinite(back[2, [0, 2, 3]]).all(), "and leaves the others alone"
    assert torch.allclose(back[2, [0, 2, 3]], values[2, [0, 2, 3]], rtol=2.0**-4)
    infinite = math.inf if scaling is Scaling.exponent else 448.0
    assert back[3, 1:3].tolist() == [infinite, -infinite]
    assert torch.isnan(back[3, 3])
    assert torch.isfinite(found.scale_inv[[0, 2, 4]]).all()
    assert (back[4] >= 0).all()
    assert torch.isfinite(back[4]).all(), "a scale is never infinite"
    if scaling is not Scaling.exponent:
        assert found.scale_inv[[0, 1, 3]].flatten().tolist() == [1.0, 1.0, 1.0]
    empty = quantize(torch.zeros(0, 4), E4M3, Tile(1, 128), scaling)
    assert empty.dequantize().shape == (0, 4)


@pytest.mark.parametrize("tile", [WHOLE, Tile(1, 8), Tile(8, 1), Tile(8, 8)])
@pytest.mark.parametrize("scaling", Scaling)
def test_a_matrix_is_quantized_tile_by_tile(tile: Tile, scaling: Scaling) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(20, 28, generator=generator) * torch.randn(20, 1, generator=generator).exp()
    found = quantize(values, E4M3, tile, scaling)
    rows, columns = tile.sizes((20, 28))
    seen = torch.zeros_like(values)
    for top in range(0, 20, rows):
        for left in range(0, 28, columns):
            block = values[top : top + rows, left : left + columns]
            scale, inverse = scales_of(block.abs().max(), E4M3, scaling)
            cut = found.payload[top : top + rows, left : left + columns].float()
            assert cut.tolist() == [[reference.E4M3.nearest(float(each)) for each in row] for row in block * scale]
            seen[top : top + rows, left : left + columns] = cut * inverse
    assert torch.equal(found.dequantize(), seen)
    transposed = quantize(values.t().contiguous(), E4M3, tile.t, scaling)
    assert torch.equal(transposed.payload.float(), found.t.payload.float())
    assert torch.equal(transposed.scale_inv, found.t.scale_inv)


test_a_mutant_is_found = each_found_by(
    "FP8 formats",
    """
    infinite: What is larger than the format's largest number becomes infinite
        fp8.quantize.cast: values.clamp(-largest(format), largest(format)).to => values.to
    rounded twice: A scale is a rounded reciprocal times the largest number
        fp8.quantize.scales_of: torch.div(torch.full_like(amax, largest(format)), amax)
            => (amax.reciprocal() * largest(format))
    the power above: A scale is rounded up to a power of two, and the largest value saturates
        fp8.quantize.scales_of: .view(torch.int32) & 0x7F800000 => .view(torch.int32) + 0x7FFFFF & 0x7F800000
    the power below: The exponent of a block is rounded down
        fp8.quantize.exponent_above: (bits + 0x7FFFFF) >> 23 => bits >> 23
    NaN for all: One NaN makes a tile's scale NaN
        fp8.quantize.amax_grid: nan_to_num(nan=0.0, posinf=math.inf) => nan_to_num(nan=math.inf, posinf=math.inf)
    no scale of zeros: A tile of zeros has an infinite scale
        fp8.quantize.scales_of: (amax == 0) | amax.isinf() => amax.isinf()
    neighbours' scales: A row has the scale of the tile before
        fp8.quantize.spread: // tile.rows] => // tile.rows - 1]
    """,
    test_a_cast_is_the_nearest_number_of_the_format,
    test_exponents_are_the_least_power_not_below,
    test_a_scale_is_rounded_once,
    test_odd_tiles_are_defined,
    test_a_matrix_is_quantized_tile_by_tile,
)
