"""Delayed scaling: scales that follow from the amaxes of past steps.

[Note: Delayed] Row 0 of a layer's amax history is the record of the running step: each quantization raises it to the
amax it sees. `update` closes the step. In this order, which is TransformerEngine's kernel's:

    amax = max(history);  history[1:] moves down by one, row 0 becomes its end and then 0
    scale = largest / 2^margin / amax     (the old scale where that amax is 0 or not finite)

So a scale made at the end of step t is used in step t + 1 and knows nothing of what that quantizes. It is state: made
again from a history that has moved on, or from weights, it is another number. TransformerEngine moves the histories at
the end of each autocast; here they move once a step, so that scales are the same however many microbatches it has.

Source: TransformerEngine `common/recipe/delayed_scaling.cu`. One thing differs: a scale never becomes infinite, as that
of an amax below 2^-119 would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from harness.fp8.formats import largest


class Column(IntEnum):
    """The operand of each column of the history."""

    activations = 0
    weights = 1
    gradients = 2


@dataclass(frozen=True)
class History:
    """One layer's amaxes, fp32 [length, 3], of which row 0 is the running step; and scales, fp32 [3], used now.

    margin: powers of two that stay free above the amax.
    """

    amax: Tensor
    scale: Tensor
    formats: Sequence[torch.dtype]
    margin: int = 0

    def record(self, column: Column, amax: Tensor) -> None:
        self.amax[0, column] = torch.maximum(self.amax[0, column], amax.reshape(()))

    def update(self) -> None:
        """Close the step: compute scales from the history, and move it on."""
        amax = self.amax.amax(dim=0)
        self.amax.copy_(self.amax.roll(-1, dims=0))
        self.amax[0] = 0.0
        top = amax.new_tensor([largest(each) for each in self.formats]) * 2.0**-self.margin
        scale = torch.div(top, amax).clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(torch.where(amax.isfinite() & (amax > 0), scale, self.scale))
