"""Scales of a weight that is held in 8 bits, for ranks that each have some of its rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harness.fp8.quantize import (
    MX_BIAS,
    Scaling,
    Tile,
    amax_grid,
    encode,
    exponent_above,
    largest,
    reciprocal_power_of,
    scales_of,
    spread,
)


class TileScales:
    """Scales of one encoding of one weight [out, in], or of a rank's TP shard of it, the same on every rank.

    Under `Scaling.exponent` ranks agree on exponents and keep these alone, one byte a tile: the exponent of the largest
    amax is the largest of the exponents. Elsewhere ranks agree on amaxes, and keep fp32 scales and their reciprocals.
    """

    def __init__(
        self, tile: Tile, shape: tuple[int, int], format: torch.dtype, scaling: Scaling, device: torch.device
    ) -> None:
        self.tile, self.shape, self.format, self.scaling = tile, shape, format, scaling
        self.grid = tile.grid(shape)
        self.num_tiles = self.grid[0] * self.grid[1]
        if scaling is Scaling.exponent:
            self._exponents = torch.full(self.grid, MX_BIAS, dtype=torch.uint8, device=device)
            self.inverse = self._exponents.view(torch.float8_e8m0fnu)
            # factor that decodes a payload, fp32 or e8m0; always the same tensor
        else:
            self.scale = torch.ones(self.grid, dtype=torch.float32, device=device)
            self.inverse = torch.ones(self.grid, dtype=torch.float32, device=device)
        self.nbytes = self.inverse.nbytes * (1 if scaling is Scaling.exponent else 2)

    def maxima(self, values: Tensor, start: int) -> Tensor:
        """Amax (fp32) or exponent (uint8) of each tile by some of its rows, the least by none; ranks take the largest.

        values: rows of the weight, flat, fp32, bf16 or fp16. start: first element of the weight in them.
        """
        found = torch.zeros(self.grid, dtype=torch.float32, device=self.inverse.device)
        if values.numel():
            top, lead = (0, 0) if self.tile.rows is None else divmod(start // self.shape[1], self.tile.rows)
            filled = functional.pad(values.detach().view(-1, self.shape[1]), (0, 0, lead, 0))
            of_rows = amax_grid(filled, self.tile)
            found[top : top + of_rows.shape[0]] = of_rows
        return exponent_above(found * (1.0 / largest(self.format))) if self.scaling is Scaling.exponent else found

    def take(self, maxima: Tensor) -> None:
        """Scale from here on by the largest of the `maxima` of all ranks, flat or not."""
        maxima = maxima.view(self.grid)
        if self.scaling is Scaling.exponent:
            self._exponents.copy_(maxima)
        else:
            scale, inverse = scales_of(maxima, self.format, self.scaling)
            self.scale.copy_(scale)
            self.inverse.copy_(inverse)

    def encode(self, values: Tensor, start: int) -> Tensor:
        """The payload of some rows, flat; arguments as of `maxima`."""
        rows, first = values.view(-1, self.shape[1]), start // self.shape[1]
        if self.scaling is Scaling.exponent:
            each = self.tile.rows or self.shape[0]
            top, bottom = first // each, -(-(first + rows.shape[0]) // each)
            grid, first = reciprocal_power_of(self._exponents[top:bottom].to(rows.device)), first - top * each
        else:
            grid = self.scale.to(rows.device)
        return encode(rows, spread(grid, self.tile, rows.shape, first), self.format).view(-1)
