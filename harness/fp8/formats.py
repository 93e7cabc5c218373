"""The 8-bit formats: the cast into them, and the exponents that MX blocks share.

Sources: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3, e5m2); OCP Microscaling
Formats (MX) Specification 1.0 (e8m0, blocks of 32); TransformerEngine `common/util/ptx.cuh`, `float_to_e8m0` and
`exp2f_rcp`.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_BIAS, _MX_LARGEST, _MX_NAN = 127, 254, 255
"""The e8m0 byte b means 2^(b - 127)."""
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are quantized: fp32 holds each of their numbers, so that a cast rounds once."""


def largest(format: torch.dtype) -> float:
    """The largest number of a format."""
    return torch.finfo(format).max


def is_8_bit(dtype: torch.dtype) -> bool:
    """True if a dtype is one of the formats."""
    return dtype in (E4M3, E5M2)


def widen(values: Tensor) -> Tensor:
    """As fp32, exactly; TypeError for a dtype that fp32 does not hold."""
    if values.dtype not in WIDENED:
        raise TypeError(f"{values.dtype} cannot be quantized to 8 bits; it is {', '.join(map(str, WIDENED))} that can")
    return values.float()


def cast(values: Tensor, format: torch.dtype) -> Tensor:
    """Round fp32 to nearest, ties to even; larger magnitudes saturate, NaN stays NaN. TypeError for another dtype.

    Above the largest e4m3, torch's own cast gives NaN or the largest number, depending on the device and kernel.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"only fp32 is cast to {format}, not {values.dtype}: widen it, or quantize() does")
    return values.clamp(-largest(format), largest(format)).to(format)


def exponent_above(values: Tensor) -> Tensor:
    """The e8m0 exponent, uint8, of the least power of two that is not below each value.

    values: fp32, not negative. Infinity gives the largest exponent; NaN gives 255, which is NaN.
    """
    bits = values.contiguous().view(torch.int32)
    above = (bits + 0x7FFFFF) >> 23  # any bit of the mantissa carries into the exponent
    above = torch.where(bits <= 1 << 22, 0, above).clamp(max=_MX_LARGEST)  # 2^-127 or less: a subnormal of fp32
    return torch.where(values.isnan(), _MX_NAN, above).to(torch.uint8)


def power_of(exponent: Tensor) -> Tensor:
    """2^(b - 127) of each e8m0 byte b; fp32, NaN of 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


def reciprocal_power_of(exponent: Tensor) -> Tensor:
    """2^(127 - b) of each e8m0 byte b; fp32. 1 for b = 0, as in TransformerEngine: its tiles round to 0 either way."""
    return torch.where(exponent == 0, 1.0, power_of(2 * MX_BIAS - exponent))
