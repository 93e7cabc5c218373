"""The recipes as data; see [Note: FP8]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from harness.fp8.quantize import E4M3, E5M2, WHOLE, Quantized, Scaling, Tile, quantize


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
