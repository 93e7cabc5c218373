"""The product of two quantized matrices: `torch.nn.functional.scaled_mm` where a device has it, else in fp32.

Products of two 8-bit numbers are exact in fp32; sums are made in fp32, in the order of torch's own matrix product.
Where each operand has one scale, the sum of products of payloads is multiplied by the product of both; elsewhere
operands are dequantized first, which is exact under scales that are powers of two (unless the value leaves fp32's
range). cuBLASLt's order of sums is another one, and before Blackwell its accumulator keeps fewer bits.

The first product of two tiles on a device is tried with numbers whose product is exact: where it raises or is wrong, a
warning says so, and products of these tiles are emulated from then on.

Sources of the layouts of scales: torch's checks of its arguments (`aten/src/ATen/native/cuda/ScaledBlas.cpp`, and for
tensors without memory `torch/_meta_registrations.py`).
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from harness.fp8.quantize import E4M3, WHOLE, Quantized, Tile

_LINE, _SQUARE = Tile(1, 128), Tile(128, 128)
PAIRS = ((WHOLE, WHOLE), (_LINE, _LINE), (_LINE, _SQUARE))
"""Tiles of a and of b in `a @ b.T` that some GPUs multiply."""


def multiply(a: Quantized, b: Quantized) -> Tensor:
    """`a @ b.T` of shape [m, n] in fp32, for a of shape [m, k] and b of shape [n, k].

    By the device itself where it multiplies these tiles, else emulated.
    """
    device = a.payload.device
    is_there = device.type == "cuda" and has_product(a.tile, b.tile, device)
    return scaled_mm(a, b) if is_there else emulate(a, b)


def emulate(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, in fp32."""
    if a.tile == WHOLE == b.tile:
        return (a.payload.float() @ b.payload.float().t()) * (a.scale_inv * b.scale_inv)
    return a.dequantize() @ b.dequantize().t()


def scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, of tiles that the device multiplies, without fast accumulation; zeros fill up sizes."""
    left, right = _filled(a), _filled(b)
    scales = *_scales(left), *_scales(right)
    product = functional.scaled_mm(left.payload, right.payload.t(), *scales, output_dtype=torch.float32)
    return product[: a.payload.shape[0], : b.payload.shape[0]]


def _filled(matrix: Quantized) -> Quantized:
    """A row-major matrix of sizes that the hardware takes; new tiles have a scale of 1."""
    multiple = 16 if matrix.tile == WHOLE else 128
    rows, columns = (-size % multiple for size in matrix.payload.shape)
    payload = matrix.payload.contiguous()
    if rows or columns:
        payload = functional.pad(payload.view(torch.uint8), (0, columns, 0, rows)).view(payload.dtype)
    grid, held = matrix.tile.grid(payload.shape), matrix.scale_inv.shape
    more = (0, grid[1] - held[1], 0, grid[0] - held[0])
    scale_inv = functional.pad(matrix.scale_inv, more, value=1.0) if any(more) else matrix.scale_inv
    return Quantized(payload, scale_inv, matrix.tile)


def _scales(matrix: Quantized) -> tuple[Tensor, ScalingType]:
    """Scales of lines lie as [rows, columns / 128], column by column; those of squares as [columns / 128, rows / 128],
    the first rounded up to a multiple of 4, column by column."""
    if matrix.tile == WHOLE:
        return matrix.scale_inv.reshape(1), ScalingType.TensorWise
    if matrix.tile == _LINE:
        return matrix.scale_inv.t().contiguous().t(), ScalingType.BlockWise1x128
    missing = -matrix.scale_inv.shape[1] % 4
    return functional.pad(matrix.scale_inv, (0, missing), value=1.0).contiguous().t(), ScalingType.BlockWise128x128


@cache
def has_product(a: Tile, b: Tile, device: torch.device) -> bool:
    """True if a device multiplies matrices of these tiles: a product of small integers, exact in any order of sums, is
    right. Warns where it is not, or raises."""
    if (a, b) not in PAIRS:
        return False
    left, right = (_small_integers(tile, device, seed) for seed, tile in enumerate((a, b)))
    try:
        if torch.equal(scaled_mm(left, right), emulate(left, right)):
            return True
        why = "gives other numbers"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"raises {error}"
    warnings.warn(
        f"scaled_mm of tiles {a} by {b} on {device} {why}: FP8 products of these tiles are emulated in fp32, which is"
        " slower",
        stacklevel=2,
    )
    return False


def _small_integers(tile: Tile, device: torch.device, seed: int) -> Quantized:
    """A matrix of -1, 0 and 1, with a scale of 1, 2 or 4 for each tile: sums that any accumulator holds."""
    shape = (256, 256)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(-1, 2, shape, generator=generator).float().to(E4M3)
    scale_inv = 2.0 ** torch.randint(0, 3, tile.grid(shape), generator=generator)
    return Quantized(payload.to(device), scale_inv.to(device), tile)
