"""Which GPU multiplies which quantized matrices, and how their scales lie for it: `torch.nn.functional.scaled_mm`.

Sources of the layouts: torch's checks of its arguments (`aten/src/ATen/native/cuda/ScaledBlas.cpp`, and the same for
tensors without memory, `torch/_meta_registrations.py`); cuBLAS documentation, "1D block scaling for FP8 and FP4 data
types" for the order of exponents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from harness.fsdp.fp8.quantize import WHOLE, Quantized, Tile

_LINE, _SQUARE = Tile(1, 128), Tile(128, 128)
_MX_LINE, _MX_SQUARE = Tile(1, 32), Tile(32, 32)
_FIRST_CUDA_WITH_BLOCKS = (12, 9)


@dataclass(frozen=True)
class Kind:
    """Tiles that one kind of GPU multiplies.

    name: for messages. tiles: of a, and of b in `a @ b.T`, any of these. multiple: both sizes of both matrices are
    filled up to a multiple of it. from_, below: compute capabilities of the devices.
    """

    name: str
    tiles: tuple[tuple[Tile, ...], tuple[Tile, ...]]
    multiple: int
    from_: tuple[int, int]
    below: tuple[int, int] = (1_000, 0)
    needs_blocks: bool = True
    """Whether CUDA 12.9 brought it."""

    def takes(self, a: Tile, b: Tile) -> bool:
        """Whether the kind multiplies a matrix of tiles a by one of tiles b."""
        return a in self.tiles[0] and b in self.tiles[1]

    def is_built(self, device: torch.device) -> bool:
        """Whether a GPU and this torch have it."""
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        is_new = not self.needs_blocks or cuda >= _FIRST_CUDA_WITH_BLOCKS
        return is_new and self.from_ <= torch.cuda.get_device_capability(device) < self.below


TENSORWISE = Kind("scaled_mm with one scale", ((WHOLE,), (WHOLE,)), 16, (8, 9), needs_blocks=False)
BLOCKWISE = Kind("scaled_mm with scales of 1x128 and 128x128", ((_LINE,), (_LINE, _SQUARE)), 128, (9, 0), (9, 1))
MX = Kind("scaled_mm with MX scales", ((_MX_LINE,), (_MX_LINE, _MX_SQUARE)), 128, (10, 0))
KINDS = (TENSORWISE, BLOCKWISE, MX)


def scaled_mm(kind: Kind, a: Quantized, b: Quantized) -> Tensor:
    """`a @ b.T` of shape [m, n] in fp32, without fast accumulation; what sizes lack is filled up with zeros.

    Args:
        kind: takes the tiles of both.
    """
    rows, columns = a.payload.shape[0], b.payload.shape[0]
    lay_out = _LAYOUTS[kind]
    left, right = _filled(a, kind.multiple), _filled(b, kind.multiple)
    (scale_a, how_a), (scale_b, how_b) = lay_out(left), lay_out(right)
    swizzle = SwizzleType.SWIZZLE_32_4_4 if kind is MX else SwizzleType.NO_SWIZZLE
    product = functional.scaled_mm(
        left.payload,
        right.payload.t(),
        scale_a,
        how_a,
        scale_b,
        how_b,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.float32,
    )
    return product.narrow(0, 0, rows).narrow(1, 0, columns)


def _filled(matrix: Quantized, multiple: int) -> Quantized:
    """A matrix with both sizes multiples of what hardware asks for, row-major; new tiles have a scale of 1."""
    rows, columns = (-size % multiple for size in matrix.payload.shape)
    payload = matrix.payload.contiguous()
    if rows or columns:
        as_bytes = functional.pad(payload.view(torch.uint8), (0, columns, 0, rows))
        payload = as_bytes.view(payload.dtype)
    grid = matrix.tile.grid((payload.shape[0], payload.shape[1]))
    more = (0, grid[1] - matrix.scale_inv.shape[1], 0, grid[0] - matrix.scale_inv.shape[0])
    scale_inv = functional.pad(matrix.scale_inv, more, value=1.0) if any(more) else matrix.scale_inv
    return Quantized(payload, scale_inv, matrix.tile)


_Laid = tuple[Tensor, ScalingType]


def _one_scale(matrix: Quantized) -> _Laid:
    return matrix.scale_inv.reshape(1), ScalingType.TensorWise


def _blocks(matrix: Quantized) -> _Laid:
    """Scales of lines lie as [rows, columns / 128], column by column; those of squares as [columns / 128, rows / 128],
    the first rounded up to a multiple of 4, column by column."""
    if matrix.tile == _LINE:
        return matrix.scale_inv.t().contiguous().t(), ScalingType.BlockWise1x128
    missing = -matrix.scale_inv.shape[1] % 4
    return functional.pad(matrix.scale_inv, (0, missing), value=1.0).contiguous().t(), ScalingType.BlockWise128x128


def _exponents(matrix: Quantized) -> _Laid:
    """One e8m0 for each line of 32, in tiles of 128 x 4 of them that lie one after the other; within a tile, exponent
    (row, column) is number `row % 32 * 16 + row // 32 * 4 + column`."""
    lines = matrix.scale_inv if matrix.tile == _MX_LINE else matrix.scale_inv.repeat_interleave(32, dim=0)
    down, across = lines.shape[0] // 128, -(-lines.shape[1] // 4)
    padded = functional.pad(lines, (0, across * 4 - lines.shape[1]), value=1.0)
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.to(torch.float8_e8m0fnu).reshape(-1), ScalingType.BlockWise1x32


_LAYOUTS: dict[Kind, Callable[[Quantized], _Laid]] = {TENSORWISE: _one_scale, BLOCKWISE: _blocks, MX: _exponents}
