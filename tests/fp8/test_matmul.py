"""What is handed to a GPU's FP8 products: by torch's own checks of arguments, and by a kernel that reads scales as
cuBLAS documents it. No GPU is at hand here; `make gpu` multiplies on one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import ScalingType

from harness.fp8 import linear
from harness.fp8.linear import PAIRS, emulate, scaled_mm
from harness.fp8.quantize import E4M3, RECIPES, Quantized, Scaling, Tile, quantize
from tests.support.mutants import each, slips

CPU = torch.device("cpu")
ROUNDING = 1e-5
"""Of fp32 sums, beside the sum of the terms' magnitudes."""
CHECKED = functional.scaled_mm
SIZES = [(37, 256, 384), (24, 128, 128), (5, 384, 640), (256, 128, 1280)]
LINES = [(128, 256, 41), (256, 384, 7)]
"""Rows, columns and summed elements; the last as for a weight's gradient, which sums over any number of tokens."""


def read(scale: Tensor, how: ScalingType, rows: int, summed: int) -> Tensor:
    """Scales of each element of a matrix [rows, summed], from where cuBLAS finds them in memory."""
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(summed).unsqueeze(0)
    flat = torch.as_strided(scale, (scale.untyped_storage().nbytes() // scale.itemsize,), (1,), 0).float()
    if how is ScalingType.TensorWise:
        return flat[torch.zeros_like(row * column)]
    if how is ScalingType.BlockWise1x128:
        return flat[row + column // 128 * rows]
    return flat[column // 128 + row // 128 * (-(-summed // 512) * 4)]


def kernel(
    a: Tensor, b: Tensor, scale_a: Tensor, how_a: ScalingType, scale_b: Tensor, how_b: ScalingType, **named: Any
) -> Tensor:
    """Stands for the GPU's: takes what torch's checks let pass, and multiplies."""
    with FakeTensorMode():
        given = a, b, scale_a, scale_b
        there = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given]
        shape = CHECKED(there[0], there[1], there[2], how_a, there[3], how_b, **named).shape
    assert named["output_dtype"] is torch.float32
    left = a.float() * read(scale_a, how_a, a.shape[0], a.shape[1])
    right = b.t().float() * read(scale_b, how_b, b.shape[1], b.shape[0])
    product = left @ right.t()
    assert product.shape == shape
    return product


def matrix(tile: Tile, rows: int, columns: int, *, transposed: bool = False) -> Quantized:
    """Of numbers whose tiles have scales far apart; transposed: of one quantized the other way."""
    size = torch.randn(-(-rows // 32), -(-columns // 32)).mul(4).exp()
    values = torch.randn(rows, columns) * size.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    if transposed:
        return quantize(values.t().contiguous(), E4M3, tile.t, Scaling.power_of_two).t
    return quantize(values, E4M3, tile, Scaling.power_of_two)


def differing() -> list[str]:
    """Products that are not those of the dequantized matrices."""
    torch.manual_seed(5)
    told = []
    with mock.patch.object(functional, "scaled_mm", kernel):
        for of_a, of_b in PAIRS:
            for rows, columns, summed in SIZES + (LINES if of_b.rows in (1, None) else []):
                for transposed in (False, True):
                    a, b = matrix(of_a, rows, summed), matrix(of_b, columns, summed, transposed=transposed)
                    found, expected = scaled_mm(a, b), emulate(a, b)
                    sums = a.dequantize().abs() @ b.dequantize().abs().t()
                    if found.shape != expected.shape or not bool(((found - expected).abs() <= ROUNDING * sums).all()):
                        told.append(f"{of_b}, {(rows, columns, summed)}, transposed: {transposed}")
    return told


def test_scales_lie_where_the_device_reads_them() -> None:
    assert differing() == []


def test_every_product_of_every_recipe_but_mx_may_be_a_gpus() -> None:
    """Forward, and both products of the backward, as `Fp8Linear` forms them; those of MX are emulated."""
    for recipe in RECIPES.values():
        x, w, g = (each.tile for each in (recipe.activations, recipe.weights, recipe.gradients))
        for a, b in ((x, w), (g, w), (g, x)):  # as each lies with the summed dimension last
            assert ((a, b) in PAIRS) == (recipe.scaling is not Scaling.exponent), recipe.name


MUTANTS = slips(
    """
    scales of rows: Scales of lines lie row by row
        fp8.linear._scales: matrix.scale_inv.t().contiguous().t(), => matrix.scale_inv.contiguous(),
    squares across: Scales of squares lie row by row
        fp8.linear._scales: value=1.0).contiguous().t(), => value=1.0).contiguous(),
    squares unfilled: Scales of squares are not filled up to a multiple of 4
        fp8.linear._scales: (0, missing) => (0, 0)
    """
)


@pytest.mark.parametrize("name", each("FP8 products of a GPU", MUTANTS))
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].put(monkeypatch)
    try:
        told = differing()
    except RuntimeError as error:
        told = [str(error)]
    assert told


WRONG = "gives other numbers"
REFUSES = "raises not on this device: FP8 products of these tiles are emulated"


@pytest.mark.parametrize("why", ["", WRONG, REFUSES])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_product_is_tried_once_and_used_where_it_is_right(a: Tile, b: Tile, why: str) -> None:
    tried = []

    def counting(*given: Any, **named: Any) -> Tensor:
        tried.append(given)
        if why == REFUSES:
            raise NotImplementedError("not on this device")
        return kernel(*given, **named) + float(why == WRONG)

    linear.has_product.cache_clear()
    with (
        mock.patch.object(functional, "scaled_mm", counting),
        pytest.warns(UserWarning, match=why) if why else nullcontext(),
    ):
        found = [linear.has_product(a, b, CPU) for _ in range(3)]
    linear.has_product.cache_clear()
    assert found == [not why] * 3
    assert len(tried) == 1
