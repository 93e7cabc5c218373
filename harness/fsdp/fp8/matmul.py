"""The product of two quantized matrices: by the hardware where it has one, else in fp32.

[Note: Emulation] Products of two 8-bit numbers are exact in fp32; sums are made in fp32, in the order of torch's own
matrix product. Where each operand has one scale, the sum of products of payloads is multiplied by the product of both;
elsewhere operands are dequantized first, which is exact under scales that are powers of two (unless the value leaves
fp32's range). cuBLASLt's order of sums is another one, and before Blackwell its accumulator keeps fewer bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from harness.fsdp.fp8.quantize import WHOLE, Quantized

_FIRST_WITH_FP8 = (8, 9)
"""Compute capability from which on a GPU multiplies FP8."""
_MULTIPLE = 16
"""What `torch._scaled_mm` wants all three sizes to be a multiple of."""


def has_hardware(device: torch.device) -> bool:
    """Whether a device multiplies FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def multiply(a: Quantized, b: Quantized) -> Tensor:
    """`a @ b.T` of shape [m, n] in fp32, for a of shape [m, k] and b of shape [n, k].

    `torch._scaled_mm` does it on GPUs that have FP8, for operands of one scale each; see [Note: Emulation].
    """
    if a.tile == WHOLE == b.tile and has_hardware(a.payload.device):
        return scaled_mm(a, b)
    return emulate(a, b)


def emulate(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, in fp32; see [Note: Emulation]."""
    if a.tile == WHOLE == b.tile:
        return (a.payload.float() @ b.payload.float().t()) * (a.scale_inv * b.scale_inv)
    return a.dequantize() @ b.dequantize().t()


def scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, by `torch._scaled_mm` without fast accumulation; rows that it lacks are filled up with zeros."""
    rows, columns = a.payload.shape[0], b.payload.shape[0]
    left, right = _filled(a.payload), _filled(b.payload)
    product = torch._scaled_mm(
        left, right.t(), scale_a=a.scale_inv.view(1), scale_b=b.scale_inv.view(1), out_dtype=torch.float32
    )
    return product[:rows, :columns]


def _filled(payload: Tensor) -> Tensor:
    """A payload with both sizes multiples of what hardware asks for, row-major."""
    missing = [-size % _MULTIPLE for size in payload.shape]
    if not any(missing):
        return payload.contiguous()
    as_bytes = functional.pad(payload.contiguous().view(torch.uint8), (0, missing[1], 0, missing[0]))
    return as_bytes.view(payload.dtype)
