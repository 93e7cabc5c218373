"""Format of a gradient between a backward and an update: a floating-point number, or an integer.

Two of a reduction's four verbs are made of these: *encode* before the traffic and *finish* after it (see [Note: Four
verbs]); and *absorb*, which adds up microbatches where that is done before any traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.fixed_point import FixedPoint
from harness.fsdp.comm.together import copy_together, scale_together
from harness.fsdp.policy import Dtypes


class Floating:
    """Numbers of a dtype policy."""

    scales_sums = True

    def __init__(self, dtypes: Dtypes) -> None:
        self.dtypes = dtypes

    def encode(self, gradients: Tensor) -> Tensor:
        """Gradients, or sums of them, as they are sent: the same tensor where they already are. Flat."""
        return gradients.to(self.dtypes.wire)

    def absorb(self, gradients: Tensor, sums: Tensor, *, add: bool) -> None:
        """Put (or `add`) unreduced gradients into sums of the same length."""
        (sums.add_ if add else sums.copy_)(gradients)

    def finish(self, sums: Sequence[Tensor], main: Sequence[Tensor], factor: float) -> None:
        """Turn sums into main gradients (the same tensors, or others), scaled; those on the host follow the device."""
        scale_together(sums, factor)
        copy_together(main, sums, follows=False)


class Integers:
    """Multiples of 2^-bits; see [Note: Exact sums].

    divisor: of the finished sums; a factor, which could not be undone exactly, is not used. beyond: int64, shape [1]:
    blocks of this step in which an element could not be written down.
    """

    scales_sums = False

    def __init__(self, fixed: FixedPoint, divisor: float, device: torch.device) -> None:
        self.fixed = fixed
        self.divisor = divisor
        self.beyond = torch.zeros(1, dtype=torch.int64, device=device)

    def encode(self, gradients: Tensor) -> Tensor:
        if gradients.dtype == torch.int64:
            return gradients
        encoded = torch.empty_like(gradients, dtype=torch.int64)
        self.fixed.encode(gradients, encoded, self.beyond)
        return encoded

    def absorb(self, gradients: Tensor, sums: Tensor, *, add: bool) -> None:
        self.fixed.encode(gradients, sums, self.beyond, add=add)

    def finish(self, sums: Sequence[Tensor], main: Sequence[Tensor], factor: float) -> None:
        for source, target in zip(sums, main, strict=True):
            self.fixed.decode(source, self.divisor, target)


Numbers = Floating | Integers
