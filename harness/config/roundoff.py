"""Unit roundoffs, to bound or to imitate rounding.

The unit roundoff u of a dtype is half the gap between 1 and the next number; rounding to nearest errs by at most u.
"""

from __future__ import annotations

import math

from harness.fsdp.options import Dtype, Fp8

UNIT = {dtype.name: 2.0**-dtype.precision for dtype in Dtype}
"""Unit roundoff by dtype: bf16 has 8 significant bits, fp16 11, fp32 24, fp64 53."""

RMS = math.sqrt(0.375 / math.log(2) / 3)
"""0.425: root-mean-square relative error of one rounding over u.

Uniform within a gap (1/3), over a mantissa m whose density is 1/(m ln 2) on [1, 2): the mean of 1/m^2 is 3/(8 ln 2).
"""

SIXTEEN_BITS = tuple(dtype.name for dtype in Dtype if dtype.bytes == 2)


FP8_UNIT = {recipe.name: (2.0**-4, 2.0**-recipe.gradient_precision) for recipe in Fp8}
"""Unit roundoffs of FP8 operands by recipe: of activations and weights, always e4m3, and of gradients."""


def lost_in_integers(bits: int, terms: int, numel: int) -> float:
    """RMS norm of the rounding in `numerics=exact`, for the mean of `terms` gradients of `numel` elements.

    Each is rounded to a multiple of 2^-bits, uniformly within a gap (1/12); their sum is exact.
    """
    return 2.0**-bits * math.sqrt(numel / (12 * terms))


FINEST = RMS * UNIT["fp32"]
"""Relative error promised by an integer reduction.

For gradients below its resolution, distances refer to the norm of which the resolution is this share.
"""
