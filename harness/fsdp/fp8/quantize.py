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

from harness.fsdp.fp8.formats import Format, exponent_above, power_of, reciprocal_power_of, widen

_FP32_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale; None: all of them."""

    rows: int | None = None
    columns: int | None = None

    @property
    def turned(self) -> Tile:
        """The tile of the transposed matrix."""
        return Tile(self.columns, self.rows)

    def sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a tile of a matrix of this shape, at least 1."""
        return max(1, self.rows or shape[0]), max(1, self.columns or shape[1])

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many tiles a matrix of this shape has, down and across; the last may be cut short."""
        rows, columns = self.sizes(shape)
        return max(1, -(-shape[0] // rows)), max(1, -(-shape[1] // columns))


WHOLE = Tile()
"""One scale for the tensor."""


class Scaling(Enum):
    """How a scale follows from an amax."""

    exact = "largest / amax, rounded to fp32"
    power_of_two = "the power of two below that"
    exponent = "the reciprocal of the e8m0 power of two above amax / largest"


def amax_grid(values: Tensor, tile: Tile) -> Tensor:
    """The largest magnitude in each tile of what is not NaN; 0 of a tile of nothing else.

    Args:
        values: shape [rows, columns], fp32, bf16 or fp16.

    Returns:
        fp32, shape `tile.grid(values.shape)`.
    """
    shape = (values.shape[0], values.shape[1])
    rows, columns = tile.sizes(shape)
    down, across = tile.grid(shape)
    magnitudes = widen(values.detach()).abs().nan_to_num(nan=0.0, posinf=math.inf)
    padded = functional.pad(magnitudes, (0, across * columns - shape[1], 0, down * rows - shape[0]))
    return padded.view(down, rows, across, columns).amax(dim=(1, 3))


def scales_of(amax: Tensor, format: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Scales that bring each amax to the format's largest number, and their reciprocals.

    Args:
        amax: fp32, any shape, no NaN.

    Returns:
        scale and scale_inv, fp32 of the same shape. Under `Scaling.exponent` both are powers of two.
    """
    if scaling is Scaling.exponent:
        exponent = exponent_above(amax * (1.0 / format.largest))
        return reciprocal_power_of(exponent), power_of(exponent)
    # not `largest / amax`, which torch makes a reciprocal and a product of, rounding twice
    scale = torch.div(torch.full_like(amax, format.largest), amax).clamp(max=_FP32_LARGEST)
    if scaling is Scaling.power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    return scale, scale.reciprocal()


def spread(grid: Tensor, tile: Tile, shape: tuple[int, int], first_row: int = 0) -> Tensor:
    """A grid of scales as something that multiplies rows `first_row` on of the matrix it belongs to.

    Args:
        shape: of the part: [rows, columns].
        first_row: of the part in the matrix that the grid is of.

    Returns:
        A tensor that broadcasts to `shape`.
    """
    if tile.columns is not None:
        grid = grid.repeat_interleave(tile.columns, dim=1)[:, : shape[1]]
    if tile.rows is None:
        return grid
    return grid[torch.arange(first_row, first_row + shape[0], device=grid.device) // tile.rows]


def encode(values: Tensor, scale: Tensor, format: Format) -> Tensor:
    """The payload of values under scales that broadcast to them: `cast(values * scale)`, the product in fp32."""
    return format.cast(widen(values.detach()) * scale)


@dataclass(frozen=True)
class Quantized:
    """A matrix in 8 bits: `payload` [rows, columns] of a format, `scale_inv` fp32, one for each tile."""

    payload: Tensor
    scale_inv: Tensor
    tile: Tile

    def dequantize(self) -> Tensor:
        """The values: `payload * scale_inv`, fp32."""
        shape = (self.payload.shape[0], self.payload.shape[1])
        return self.payload.float() * spread(self.scale_inv, self.tile, shape)

    @property
    def t(self) -> Quantized:
        """The transposed matrix, of the same bits; a view."""
        return Quantized(self.payload.t(), self.scale_inv.t(), self.tile.turned)


def quantize(values: Tensor, format: Format, tile: Tile, scaling: Scaling, scale: Tensor | None = None) -> Quantized:
    """Quantize a matrix.

    Args:
        values: shape [rows, columns], fp32, bf16 or fp16.
        scale: fp32, what to use instead of the scales that `scaling` makes of the values now.

    Raises:
        TypeError: another dtype.
    """
    if scale is None:
        scale, inverse = scales_of(amax_grid(values, tile), format, scaling)
    else:
        inverse = scale.reciprocal()
    shape = (values.shape[0], values.shape[1])
    return Quantized(encode(values, spread(scale, tile, shape), format), inverse, tile)
