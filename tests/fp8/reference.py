"""FP8 by exact arithmetic: every number of a format as a fraction, the nearest found by comparison. Shares no code."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from math import isinf, isnan, nan


class Exact:
    """A format with sign, `exponent_bits` and `mantissa_bits`; `has_infinity` as in IEEE formats, else NaN alone."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> None:
        bias, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
        self.codes: list[tuple[Fraction, int]] = []
        for code in range(128):
            exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
            if exponent == top and (has_infinity or mantissa == 2**mantissa_bits - 1):
                continue
            lead = 1 if exponent else 0
            fraction = lead + Fraction(mantissa, 2**mantissa_bits)
            self.codes.append((fraction * Fraction(2) ** (max(exponent, 1) - bias), code))
        self.numbers = [number for number, _ in self.codes]

    def nearest(self, value: float) -> float:
        """The number of the format that is nearest, ties to the even code, saturating; NaN of NaN."""
        if isnan(value):
            return nan
        sign = -1.0 if value < 0 else 1.0
        if isinf(value) or abs(Fraction(value)) >= self.numbers[-1]:
            return sign * float(self.numbers[-1])
        size = abs(Fraction(value))
        above = bisect_left(self.numbers, size)
        if self.numbers[above] == size:
            return sign * float(size)
        (low, code), (high, _) = self.codes[above - 1], self.codes[above]
        if size - low == high - size:
            return sign * float(low if code % 2 == 0 else high)
        return sign * float(low if size - low < high - size else high)


E4M3 = Exact(4, 3, has_infinity=False)
E5M2 = Exact(5, 2, has_infinity=True)


def to_fp32(value: Fraction) -> float:
    """The fp32 number nearest to a fraction, ties to even; normal numbers only."""
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    while Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    return float(round(value / step) * step)  # round() of a fraction takes ties to even


def power_above(value: Fraction) -> int:
    """The least exponent e with 2^e >= value, at least -127, as an e8m0 byte."""
    if value == 0:
        return 0
    exponent = -127
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent + 127
