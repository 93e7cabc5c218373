"""Delayed scaling: scales that follow from the amaxes of past steps.

[Note: Delayed] Row 0 of a layer's amax history is the record of the step that runs: each quantization raises it to the
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from harness.fsdp.fp8.formats import Format

Reduce = Callable[[Tensor], None]
"""Makes of each element the largest over some ranks, in place."""
LENGTH = 1024
"""Steps a history looks back, TransformerEngine's default."""


class Column(IntEnum):
    """Which operand a column of the history is of."""

    activations = 0
    weights = 1
    gradients = 2


@dataclass(frozen=True)
class History:
    """One layer's amaxes and scales.

    amax: fp32, [length, 3]; row 0 is the step that runs. scale: fp32, [3]; what quantizes now. formats: of the three
    columns. margin: powers of two that stay free above the amax.
    """

    amax: Tensor
    scale: Tensor
    formats: tuple[Format, Format, Format]
    margin: int = 0

    def record(self, column: Column, amax: Tensor) -> None:
        """Note an amax (one fp32) of the step that runs."""
        seen = self.amax[0, column]
        seen.copy_(torch.maximum(seen, amax.reshape(())))

    def update(self) -> None:
        """Close the step: make scales of what is known, and move the history on."""
        amax = self.amax.amax(dim=0)
        rolled = self.amax.roll(-1, dims=0)
        rolled[0] = 0.0
        self.amax.copy_(rolled)
        largest = amax.new_tensor([each.largest for each in self.formats]) * 2.0**-self.margin
        scale = torch.div(largest, amax).clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(torch.where(amax.isfinite() & (amax > 0), scale, self.scale))


def update_all(histories: Sequence[History], reduce: Reduce | None) -> None:
    """Close the step of several layers. *Collective* where `reduce` is: one call for all of them.

    Args:
        reduce: over all ranks that see other data; None where there is but one.
    """
    if not histories:
        return
    seen = torch.stack([each.amax[0] for each in histories])
    if reduce is not None:
        reduce(seen)
    for each, amax in zip(histories, seen, strict=True):
        each.amax[0] = amax
        each.update()
