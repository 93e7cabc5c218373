"""Scales of a weight that is held in 8 bits: what ranks that have some of its rows agree on, and what is kept of it."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.fsdp.fp8.formats import MX_BIAS, Format, exponent_above, reciprocal_power_of
from harness.fsdp.fp8.quantize import Scaling, Tile, amax_grid, scales_of, spread


class TileScales:
    """Scales of one payload of one weight, or of a rank's portion of it: one for each tile, the same on every rank.

    Where scales are powers of two of 8 bits (`Scaling.exponent`), these are what ranks agree on and what is kept, one
    byte a tile: the exponent of the largest amax is the largest of the exponents. Elsewhere ranks agree on amaxes,
    and scales are kept in fp32 beside their reciprocals.

    Args:
        tile: of the weight [out, in] as it lies.
        shape: of the weight.
        format: of the payload. scaling: how a scale follows from an amax.
    """

    def __init__(
        self, tile: Tile, shape: tuple[int, int], format: Format, scaling: Scaling, device: torch.device
    ) -> None:
        self.tile, self.shape, self.format, self.scaling = tile, shape, format, scaling
        self.grid = tile.grid(shape)
        if scaling is Scaling.exponent:
            self._exponents = torch.full(self.grid, MX_BIAS, dtype=torch.uint8, device=device)
            self.inverse = self._exponents.view(torch.float8_e8m0fnu)
            """What a payload is multiplied by to be read, fp32 or e8m0; always the same tensor."""
        else:
            self.scale = torch.ones(self.grid, dtype=torch.float32, device=device)
            self.inverse = torch.ones(self.grid, dtype=torch.float32, device=device)

    @property
    def num_tiles(self) -> int:
        """How many tiles there are."""
        return self.grid[0] * self.grid[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self.inverse.nbytes if self.scaling is Scaling.exponent else self.inverse.nbytes + self.scale.nbytes

    def told_by(self, rows: Tensor, first: int) -> Tensor:
        """What some rows tell of all tiles, to be made the largest over all ranks; the least there is elsewhere.

        Args:
            rows: of the weight, shape [rows, in], fp32, bf16 or fp16. first: where they begin.

        Returns:
            fp32 or uint8, shape `grid`.
        """
        found = torch.zeros(self.grid, dtype=torch.float32, device=self.inverse.device)
        if rows.numel():
            each = self.tile.rows
            lead = 0 if each is None else first % each
            filled = rows.new_zeros(lead + rows.shape[0], rows.shape[1])
            filled[lead:] = rows.detach()
            of_rows = amax_grid(filled, self.tile)
            top = 0 if each is None else first // each
            found[top : top + of_rows.shape[0]] = of_rows
        return exponent_above(found * (1.0 / self.format.largest)) if self.scaling is Scaling.exponent else found

    def take(self, agreed: Tensor) -> None:
        """Scale from here on by what ranks have agreed on: the largest of what `told_by` gave, flat or not."""
        agreed = agreed.view(self.grid)
        if self.scaling is Scaling.exponent:
            self._exponents.copy_(agreed)
        else:
            self.set(*scales_of(agreed, self.format, self.scaling))

    def set(self, scale: Tensor, inverse: Tensor) -> None:
        """Scale from here on by these, fp32, which broadcast to the grid."""
        self.scale.copy_(scale)
        self.inverse.copy_(inverse)

    def of_rows(self, num_rows: int, first: int, device: torch.device) -> Tensor:
        """What rows are multiplied with to be cast: fp32, broadcasts to [num_rows, in]."""
        if self.scaling is not Scaling.exponent:
            return spread(self.scale.to(device), self.tile, (num_rows, self.shape[1]), first)
        each = self.tile.rows or self.shape[0]
        top, bottom = first // each, -(-(first + num_rows) // each)
        scale = reciprocal_power_of(self._exponents[top:bottom].to(device))
        return spread(scale, self.tile, (num_rows, self.shape[1]), first - top * each)
