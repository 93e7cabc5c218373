"""The recipes as data; see [Note: FP8]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.fsdp.fp8.formats import E4M3, E5M2, Format
from harness.fsdp.fp8.quantize import WHOLE, Scaling, Tile
from harness.fsdp.vocabulary import Fp8


@dataclass(frozen=True)
class Operand:
    """How one operand of a product is quantized.

    tile: as the operand lies with the summed dimension last.
    """

    format: Format
    tile: Tile

    @property
    def is_one_for_both(self) -> bool:
        """Whether the matrix and its transpose are quantized to the same numbers."""
        return self.tile == self.tile.turned


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    scaling: how scales follow from amaxes. delayed: they are those of past steps. Both dimensions of a weight are
    multiples of the name's (16 is cuBLASLt's for 8-bit products). Activations and gradients may have any number of
    rows: a tile that is cut short is quantized as one filled up with zeros.
    """

    name: Fp8
    activations: Operand
    weights: Operand
    gradients: Operand
    scaling: Scaling
    delayed: bool = False

    @property
    def multiple(self) -> int:
        """What both dimensions of a weight are multiples of."""
        return self.name.multiple

    @property
    def held_tiles(self) -> tuple[Tile, ...]:
        """Tiles of each payload that an engine holds of a weight, as the weight [out, in] lies: one payload for both
        directions, or that of the forward and that of the backward."""
        tile = self.weights.tile
        return (tile,) if self.weights.is_one_for_both else (tile, tile.turned)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be quantized by this recipe."""
        return len(shape) == 2 and all(size and size % self.multiple == 0 for size in shape)


def _hybrid(name: Fp8, *, delayed: bool) -> Recipe:
    forward, backward = Operand(E4M3, WHOLE), Operand(E5M2, WHOLE)
    return Recipe(name, forward, forward, backward, Scaling.exact, delayed)


_LINE = Operand(E4M3, Tile(1, 128))
_MX = Operand(E4M3, Tile(1, 32))
RECIPES: Mapping[Fp8, Recipe] = {
    Fp8.current: _hybrid(Fp8.current, delayed=False),
    Fp8.delayed: _hybrid(Fp8.delayed, delayed=True),
    Fp8.block: Recipe(Fp8.block, _LINE, Operand(E4M3, Tile(128, 128)), _LINE, Scaling.power_of_two),
    Fp8.mx: Recipe(Fp8.mx, _MX, _MX, _MX, Scaling.exponent),
    Fp8.mx_32x32: Recipe(Fp8.mx_32x32, _MX, Operand(E4M3, Tile(32, 32)), _MX, Scaling.exponent),
}
"""Every recipe by its name."""
