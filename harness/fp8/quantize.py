"""Recipes, and quantizing a matrix tile by tile: amax, scales, payload. See [Note: FP8] and [Note: Odd tiles].

Sources: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3, e5m2); OCP Microscaling
Formats (MX) Specification 1.0 (e8m0, blocks of 32); TransformerEngine `common/recipe/recipe_common.cuh`
(`compute_scale_from_amax`), `common/cast/mxfp8`, `common/util/ptx.cuh` (`float_to_e8m0`, `exp2f_rcp`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are quantized: fp32 holds each of their numbers, so that a cast rounds once."""


def largest(format: torch.dtype) -> float:
    return torch.finfo(format).max


def is_8_bit(dtype: torch.dtype) -> bool:
    return dtype in (E4M3, E5M2)


def widen(values: Tensor) -> Tensor:
    """As fp32, exactly; TypeError for a dtype that fp32 does not hold."""
    if values.dtype not in WIDENED:
        raise TypeError(f"{values.dtype} cannot be quantized to 8 bits; it is {', '.join(map(str, WIDENED))} that can")
    return values.float()


def cast(values: Tensor, format: torch.dtype) -> Tensor:
    """Round fp32 to nearest, ties to even; larger magnitudes saturate, NaN stays NaN.

    Above the largest e4m3, torch's own cast gives NaN or the largest number, depending on the device and kernel.
    """
    return values.clamp(-largest(format), largest(format)).to(format)


def exponent_above(values: Tensor) -> Tensor:
    """The e8m0 exponent, uint8, of the least power of two that is not below each value.

    values: fp32, not negative. Infinity gives the largest exponent; NaN gives 255, which is NaN.
    """
    bits = values.contiguous().view(torch.int32)
    above = (bits + 0x7FFFFF) >> 23  # any bit of the mantissa carries into the exponent
    above = torch.where(bits <= 1 << 22, 0, above).clamp(max=254)  # 2^-127 or less: a subnormal of fp32
    return torch.where(values.isnan(), 255, above).to(torch.uint8)


def power_of(exponent: Tensor) -> Tensor:
    """2^(b - 127) of each e8m0 byte b; fp32, NaN of 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


@dataclass(frozen=True)
class Tile:
    """Rows and columns that share a scale; None: all of them."""

    rows: int | None = None
    columns: int | None = None

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" if self.rows else "whole"

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
        # 1 for the byte 0, as in TransformerEngine: its tiles round to 0 either way
        return torch.where(exponent == 0, 1.0, power_of(254 - exponent)), power_of(exponent)
    # not `largest / amax`, which torch makes a reciprocal and a product of, rounding twice
    scale = torch.div(torch.full_like(amax, largest(format)), amax).clamp(max=largest(torch.float32))
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


def quantize(values: Tensor, format: torch.dtype, tile: Tile, scaling: Scaling) -> Quantized:
    """Quantize a matrix [rows, columns] of fp32, bf16 or fp16; TypeError for another dtype."""
    scale, inverse = scales_of(amax_grid(values, tile), format, scaling)
    return Quantized(encode(values, spread(scale, tile, values.shape), format), inverse, tile)


class TileScales:
    """Scales, and their reciprocals, of a weight in 8 bits of which each rank has some rows; the same on every rank.
    fp32, one for each tile.

    payload: [out, in], where the weight has values while it is unsharded.
    """

    def __init__(self, payload: Tensor, tile: Tile, scaling: Scaling) -> None:
        self.payload, self.tile, self.scaling = payload, tile, scaling
        self.scale, self.inverse = torch.ones(2, *tile.grid(payload.shape), dtype=torch.float32, device=payload.device)

    def __call__(self) -> Quantized:
        """The unsharded weight, as products take it."""
        return Quantized(self.payload, self.inverse, self.tile)

    def maxima(self, values: Tensor, start: int) -> Tensor:
        """Amax of each tile by some of its rows, 0 by none; ranks take the largest. fp32, flat.

        values: rows of the weight, flat, fp32, bf16 or fp16. start: first element of the weight in them.
        """
        found = torch.zeros_like(self.scale)
        if values.numel():
            columns = self.payload.shape[1]
            top, lead = (0, 0) if self.tile.rows is None else divmod(start // columns, self.tile.rows)
            of_rows = amax_grid(functional.pad(values.detach().view(-1, columns), (0, 0, lead, 0)), self.tile)
            found[top : top + of_rows.shape[0]] = of_rows
        return found.view(-1)

    def take(self, maxima: Tensor) -> None:
        """Scale from here on by the largest of the `maxima` of all ranks."""
        scale, inverse = scales_of(maxima.view_as(self.scale), self.payload.dtype, self.scaling)
        self.scale.copy_(scale)
        self.inverse.copy_(inverse)

    def encode(self, values: Tensor, start: int) -> Tensor:
        """The payload of some rows, flat; arguments as of `maxima`."""
        rows = values.view(-1, self.payload.shape[1])
        scale = spread(self.scale.to(rows.device), self.tile, rows.shape, start // rows.shape[1])
        return encode(rows, scale, self.payload.dtype).view(-1)


@dataclass(frozen=True)
class Operand:
    """One operand of a product; tile: as it lies with the summed dimension last."""

    format: torch.dtype
    tile: Tile

    @property
    def is_symmetric(self) -> bool:
        """True if the matrix and its transpose are quantized to the same numbers."""
        return self.tile == self.tile.t


@dataclass(frozen=True)
class Recipe:
    """Formats and tiles of the operands. Activations and gradients may have any number of rows: a tile cut short is
    quantized as if filled with zeros."""

    name: str
    activations: Operand
    weights: Operand
    gradients: Operand
    scaling: Scaling

    @property
    def multiple(self) -> int:
        """A divisor of both dimensions of a weight: of its tiles, and 16 of cuBLASLt's 8-bit matrices."""
        return max(16, self.weights.tile.rows or 0, self.weights.tile.columns or 0)

    def quantize(self, operand: Operand, values: Tensor, *, transposed: bool = False) -> Quantized:
        """The values [rows, columns] as they lie, in tiles for a product with them or with their transpose."""
        return quantize(values, operand.format, operand.tile.t if transposed else operand.tile, self.scaling)

    def quantize_pair(self, operand: Operand, values: Tensor) -> tuple[Quantized, Quantized]:
        """The values [rows, columns] and their transpose, each for a product over its last dimension."""
        first = self.quantize(operand, values)
        return first, (first if operand.is_symmetric else self.quantize(operand, values, transposed=True)).t


_WHOLE, _LINE, _MX = (Operand(E4M3, tile) for tile in (WHOLE, Tile(1, 128), Tile(1, 32)))
RECIPES: Mapping[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("current", _WHOLE, _WHOLE, Operand(E5M2, WHOLE), Scaling.exact),
        Recipe("block", _LINE, Operand(E4M3, Tile(128, 128)), _LINE, Scaling.power_of_two),
        Recipe("mx", _MX, _MX, _MX, Scaling.exponent),
        Recipe("mx_32x32", _MX, Operand(E4M3, Tile(32, 32)), _MX, Scaling.exponent),
    )
}


def recipe_of(given: str | Enum) -> Recipe:
    """A recipe by its name, or by a member of an enum that has its name; ValueError if there is none."""
    name = given.name if isinstance(given, Enum) else given
    if name not in RECIPES:
        raise ValueError(f"recipe={given!r} is not one of {', '.join(RECIPES)}")
    return RECIPES[name]
