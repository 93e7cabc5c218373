"""Digest of weights that is the same in every layout: a sum over elements, each hashed with its global index."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from harness.probe.step_checks.sketch import Place, Range

AT_ONCE = 1 << 20
"""Elements of a part; a part takes some 40 bytes an element meanwhile."""
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd factors with bits everywhere: of splitmix64 and murmur3, as signed numbers."""


def digest(name: str, piece: Tensor, place: Place | Range, width: int) -> int:
    """Sum over a piece's elements modulo 2**64; pieces of a tensor add up to the whole. Args: width: of its rows."""
    if isinstance(place, Range):
        return sum(digest(name, elements, block, width) for block, elements in place.blocks(piece, width)) % 2**64
    (top, _), (left, right) = place.rows, place.columns
    wide = right - left
    bits = piece.detach().contiguous().view(BITS[piece.element_size()]).reshape(-1)
    total, seed = 0, zlib.crc32(name.encode())
    for begin in range(0, bits.numel(), AT_ONCE):
        part = bits[begin : begin + AT_ONCE].to(torch.int64)
        at = torch.arange(begin, begin + part.numel(), device=part.device)
        index = (top + at // wide) * width + left + at % wide
        mixed = part * ODD[0] + (index + seed) * ODD[1]
        mixed = (mixed ^ (mixed >> 29)) * ODD[2]
        mixed = (mixed ^ (mixed >> 32)) * ODD[0]
        total += int((mixed ^ (mixed >> 31)).sum())
    return total % 2**64
