"""The 8-bit formats: what they hold, the cast into them, and the exponents that MX blocks share.

Sources: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3, e5m2); OCP Microscaling
Formats (MX) Specification 1.0 (e8m0, blocks of 32); TransformerEngine `common/util/ptx.cuh`, `float_to_e8m0` and
`exp2f_rcp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MX_BIAS = 127
"""What an e8m0 exponent is biased by: the byte b means 2^(b - 127); 255 is NaN."""
_MX_LARGEST, _MX_NAN = 254, 255
_MANTISSA_BITS = 23
"""How many bits an fp32 number has below its exponent."""
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are quantized: fp32 holds each of their numbers, so that a cast rounds once."""


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format.

    dtype: torch's. largest: its largest number. precision: significant bits, the hidden one included: rounding to
    nearest errs by at most 2**-precision of a normal number. smallest: its least number above 0, the subnormals' step.
    """

    dtype: torch.dtype
    largest: float
    precision: int
    smallest: float

    def cast(self, values: Tensor) -> Tensor:
        """Round to nearest, ties to even; what is too large saturates, NaN stays NaN.

        torch's own cast is clamped away from: of numbers above the largest e4m3 it makes NaN or the largest, depending
        on the device and on the kernel.

        Args:
            values: fp32, any shape.

        Raises:
            TypeError: other dtypes, whose rounding on the way to fp32 would be a second one.
        """
        if values.dtype != torch.float32:
            raise TypeError(f"only fp32 is cast to {self.dtype}, not {values.dtype}: widen it, or quantize() does")
        return values.clamp(-self.largest, self.largest).to(self.dtype)


E4M3 = Format(torch.float8_e4m3fn, 448.0, 4, 2.0**-9)
"""Four exponent bits, no infinities."""
E5M2 = Format(torch.float8_e5m2, 57344.0, 3, 2.0**-16)
"""Five exponent bits: the range of fp16."""


def is_8_bit(dtype: torch.dtype) -> bool:
    """Whether a dtype is the payload of one of the formats."""
    return dtype in (E4M3.dtype, E5M2.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """A payload as uint8 in place, for backends that know no 8-bit floats; anything else as it is."""
    return tensor.view(torch.uint8) if is_8_bit(tensor.dtype) else tensor


def widen(values: Tensor) -> Tensor:
    """As fp32, exactly.

    Raises:
        TypeError: a dtype that fp32 does not hold.
    """
    if values.dtype not in WIDENED:
        known = ", ".join(str(each) for each in WIDENED)
        raise TypeError(f"{values.dtype} cannot be quantized to 8 bits; it is {known} that can")
    return values.float()


def exponent_above(values: Tensor) -> Tensor:
    """The e8m0 exponent of the least power of two that is not below each value; uint8, shape of `values`.

    Args:
        values: fp32, not negative. Infinity gives the largest exponent; NaN gives 255, which is NaN.
    """
    bits = values.contiguous().view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    below_smallest = (exponent == 0) & (mantissa <= 1 << (_MANTISSA_BITS - 1))  # 2^-127, or less: a subnormal of fp32
    exponent = exponent + ((mantissa > 0) & ~below_smallest)
    exponent = exponent.clamp(max=_MX_LARGEST)
    return torch.where(values.isnan(), _MX_NAN, exponent).to(torch.uint8)


def power_of(exponent: Tensor) -> Tensor:
    """2^(b - 127) of each e8m0 byte b; fp32, NaN of 255."""
    return exponent.view(torch.float8_e8m0fnu).float()


def reciprocal_power_of(exponent: Tensor) -> Tensor:
    """2^(127 - b) of each e8m0 byte b, by which values are multiplied; fp32.

    Of 0 it is 1, as in TransformerEngine: its tiles hold nothing that e4m3 does not round to 0 either way.
    """
    return torch.where(exponent == 0, 1.0, power_of(2 * MX_BIAS - exponent))
