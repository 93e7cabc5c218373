"""Quantizing a matrix tile by tile: amax, scales, payload, and back. See [Note: FP8] and [Note: Odd tiles].

Sources of the formulas: TransformerEngine `common/recipe/recipe_common.cuh` (`compute_scale_from_amax`),
`common/recipe/delayed_scaling.cu`, `common/cast/mxfp8`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from harness.fp8.formats import cast, exponent_above, largest, power_of, reciprocal_power_of, widen

_FP32_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale; None: all of them."""

    rows: int | None = None
    columns: int | None = None

    @property
    def t(self) -> Tile:
        """The tile of the transposed matrix."""
        return Tile(self.columns, self.rows)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a tile of a matrix of this shape, at least 1."""
        return max(1, self.rows or shape[0]), max(1, self.columns or shape[1])

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Tiles of a matrix of this shape, down and across; the last may be cut short."""
        rows, columns = self.sizes(shape)
        return max(1, -(-shape[0] // rows)), max(1, -(-shape[1] // columns))


WHOLE = Tile()


class Scaling(Enum):
    """How a scale follows from an amax."""

    exact = "largest / amax, rounded to fp32"
    power_of_two = "the power of two below that"
    exponent = "the reciprocal of the e8m0 power of two above amax / largest"


def amax_grid(values: Tensor, tile: Tile) -> Tensor:
    """The largest magnitude in each tile, NaN ignored; fp32, shape `tile.grid(values.shape)`.

    values: shape [rows, columns], fp32, bf16 or fp16.
    """
    shape = values.shape
    rows, columns = tile.sizes(shape)
    down, across = tile.grid(shape)
    magnitudes = widen(values.detach()).abs().nan_to_num(nan=0.0, posinf=math.inf)
    padded = functional.pad(magnitudes, (0, across * columns - shape[1], 0, down * rows - shape[0]))
    return padded.view(down, rows, across, columns).amax(dim=(1, 3))


def scales_of(amax: Tensor, format: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Scales that bring each amax to the format's largest number, and their reciprocals; fp32, shape of `amax`.

    amax: fp32, no NaN.
    """
    if scaling is Scaling.exponent:
        exponent = exponent_above(amax * (1.0 / largest(format)))
        return reciprocal_power_of(exponent), power_of(exponent)
    # not `largest / amax`, which torch makes a reciprocal and a product of, rounding twice
    scale = torch.div(torch.full_like(amax, largest(format)), amax).clamp(max=_FP32_LARGEST)
    if scaling is Scaling.power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    return scale, scale.reciprocal()


def spread(grid: Tensor, tile: Tile, shape: tuple[int, ...], first_row: int = 0) -> Tensor:
    """A grid of scales as a tensor that broadcasts to `shape`: rows of its matrix from `first_row` on."""
    if tile.columns is not None:
        grid = grid.repeat_interleave(tile.columns, dim=1)[:, : shape[1]]
    if tile.rows is None:
        return grid
    return grid[torch.arange(first_row, first_row + shape[0], device=grid.device) // tile.rows]


def encode(values: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    """The payload of values under scales that broadcast to them: `cast(values * scale)`, the product in fp32."""
    return cast(widen(values.detach()) * scale, format)


@dataclass(frozen=True)
class Quantized:
    """A matrix in 8 bits: `payload` [rows, columns] of a format, `scale_inv` fp32, one for each tile."""

    payload: Tensor
    scale_inv: Tensor
    tile: Tile

    def dequantize(self) -> Tensor:
        """The values: `payload * scale_inv`, fp32."""
        return self.payload.float() * spread(self.scale_inv, self.tile, self.payload.shape)

    @property
    def t(self) -> Quantized:
        """The transposed matrix, of the same bits; a view."""
        return Quantized(self.payload.t(), self.scale_inv.t(), self.tile.t)


def quantize(
    values: Tensor, format: torch.dtype, tile: Tile, scaling: Scaling, scale: Tensor | None = None
) -> Quantized:
    """Quantize a matrix [rows, columns] of fp32, bf16 or fp16; TypeError for another dtype.

    scale: fp32, in place of the scales that `scaling` makes of the values.
    """
    if scale is None:
        scale, inverse = scales_of(amax_grid(values, tile), format, scaling)
    else:
        inverse = scale.reciprocal()
    return Quantized(encode(values, spread(scale, tile, values.shape), format), inverse, tile)
