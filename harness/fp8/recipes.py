"""The recipes as data; see [Note: FP8]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from harness.fp8.quantize import E4M3, E5M2, WHOLE, Scaling, Tile


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
    """Formats and tiles of the operands (activations, weights, gradients).

    Activations and gradients may have any number of rows: a tile cut short is quantized as if filled with zeros.
    """

    name: str
    operands: tuple[Operand, Operand, Operand]
    scaling: Scaling

    @property
    def weights(self) -> Operand:
        return self.operands[1]

    @property
    def multiple(self) -> int:
        """A divisor of both dimensions of a weight: of its tiles, and 16 of cuBLASLt's 8-bit matrices."""
        return max(16, self.weights.tile.rows or 0, self.weights.tile.columns or 0)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a weight of this shape can be quantized by this recipe."""
        return len(shape) == 2 and all(size and size % self.multiple == 0 for size in shape)


_HYBRID = Operand(E4M3, WHOLE), Operand(E4M3, WHOLE), Operand(E5M2, WHOLE)
_LINE, _MX = Operand(E4M3, Tile(1, 128)), Operand(E4M3, Tile(1, 32))
RECIPES: Mapping[str, Recipe] = {
    "current": Recipe("current", _HYBRID, Scaling.exact),
    "block": Recipe("block", (_LINE, Operand(E4M3, Tile(128, 128)), _LINE), Scaling.power_of_two),
    "mx": Recipe("mx", (_MX, _MX, _MX), Scaling.exponent),
    "mx_32x32": Recipe("mx_32x32", (_MX, Operand(E4M3, Tile(32, 32)), _MX), Scaling.exponent),
}


def recipe_of(given: str | Enum) -> Recipe:
    """A recipe by its name, or by a member of an enum that has its name; ValueError if there is none."""
    name = given.name if isinstance(given, Enum) else given
    if name not in RECIPES:
        raise ValueError(f"recipe={given!r} is not one of {', '.join(RECIPES)}")
    return RECIPES[name]
