"""The product of two quantized matrices: by the hardware where it has one, else in fp32.

[Note: Emulation] Products of two 8-bit numbers are exact in fp32; sums are made in fp32, in the order of torch's own
matrix product. Where each operand has one scale, the sum of products of payloads is multiplied by the product of both;
elsewhere operands are dequantized first, which is exact under scales that are powers of two (unless the value leaves
fp32's range). cuBLASLt's order of sums is another one, and before Blackwell its accumulator keeps fewer bits.

[Note: Hardware products] `harness.fsdp.fp8.hardware` says which device multiplies which tiles, and how scales lie for
it. The first product of a kind on a device is tried with numbers whose product is exact: where it raises or is wrong, a
warning says so, and products of that kind are emulated from then on.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from harness.fsdp.fp8.formats import E4M3
from harness.fsdp.fp8.hardware import KINDS, Kind, scaled_mm
from harness.fsdp.fp8.quantize import WHOLE, Quantized, Tile


def multiply(a: Quantized, b: Quantized) -> Tensor:
    """`a @ b.T` of shape [m, n] in fp32, for a of shape [m, k] and b of shape [n, k].

    By the device itself where it multiplies these tiles; see [Note: Hardware products] and [Note: Emulation].
    """
    if a.payload.device.type == "cuda":
        kind = _kind_for(a.tile, b.tile, a.payload.device)
        if kind is not None:
            return scaled_mm(kind, a, b)
    return emulate(a, b)


def emulate(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, in fp32; see [Note: Emulation]."""
    if a.tile == WHOLE == b.tile:
        return (a.payload.float() @ b.payload.float().t()) * (a.scale_inv * b.scale_inv)
    return a.dequantize() @ b.dequantize().t()


@cache
def _kind_for(a: Tile, b: Tile, device: torch.device) -> Kind | None:
    """How a device multiplies matrices of these tiles; None where it does not, or not as it should."""
    kind = next((kind for kind in KINDS if kind.takes(a, b) and kind.is_built(device)), None)
    return None if kind is None or not is_right(kind, a, b, device) else kind


def is_right(kind: Kind, a: Tile, b: Tile, device: torch.device) -> bool:
    """Whether a product of small whole numbers under scales of their own, which no order of sums can change, is what it
    is. Warns where it is not, or cannot be made."""
    left, right = (_whole_numbers(tile, device, seed) for seed, tile in enumerate((a, b)))
    try:
        if torch.equal(scaled_mm(kind, left, right), emulate(left, right)):
            return True
        why = "gives other numbers"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"raises {error}"
    warnings.warn(
        f"{kind.name} on {device} {why}: FP8 products of these tiles are emulated in fp32, which is slower",
        stacklevel=2,
    )
    return False


def _whole_numbers(tile: Tile, device: torch.device, seed: int) -> Quantized:
    """A matrix of -1, 0 and 1, with a scale of 1, 2 or 4 for each tile: sums that any accumulator holds."""
    shape = (256, 256)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(-1, 2, shape, generator=generator).float().to(E4M3.dtype)
    scale_inv = 2.0 ** torch.randint(0, 3, tile.grid(shape), generator=generator)
    return Quantized(payload.to(device), scale_inv.to(device), tile)
