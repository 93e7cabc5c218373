"""A weight that is held in 8 bits, for ranks that each have some of its rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harness.fp8.quantize import Quantized, amax_grid, encode, scales_of, spread
from harness.fp8.recipes import Recipe


class TileScales:
    """Scales of a weight and their reciprocals, the same on every rank; fp32, one for each tile.

    payload: [out, in], where the weight has values while it is unsharded.
    """

    def __init__(self, recipe: Recipe, payload: Tensor) -> None:
        self.tile, self.payload, self.format, self.scaling = recipe.weights.tile, payload, payload.dtype, recipe.scaling
        grid = self.tile.grid(payload.shape)
        self.scale, self.inverse = torch.ones(2, *grid, dtype=torch.float32, device=payload.device)

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
        scale, inverse = scales_of(maxima.view_as(self.scale), self.format, self.scaling)
        self.scale.copy_(scale)
        self.inverse.copy_(inverse)

    def encode(self, values: Tensor, start: int) -> Tensor:
        """The payload of some rows, flat; arguments as of `maxima`."""
        rows = values.view(-1, self.payload.shape[1])
        scale = spread(self.scale.to(rows.device), self.tile, rows.shape, start // rows.shape[1])
        return encode(rows, scale, self.format).view(-1)
