"""Compute weights of a bucket by direction: one tensor for forward and backward, or one for each.

[Note: Two payloads] The recipe `mx` quantizes a weight along the dimension that a product sums over: along rows for the
forward, along columns for the backward. The two payloads have other bits, and neither follows from the other. A bucket
of such weights has two *sides*, each with a payload of its own, laid out alike; all else (main weights, gradients,
cuts) it has once. Where weights are kept whole, both sides are. Under `optim_grads_params` a forward gathers the one
and a backward the other, one byte a parameter each, as Megatron-FSDP does; so the last unit of a forward does not stay
for the backward, as others do. The root, whose weights stay from the forward's begin to the backward's end, has both.

In a backward the forward's side is wanted too where a forward is computed again. Whether that is so the first backward
tells, which gathers both sides; all ranks then agree on it for each unit, so that none gathers what others do not. A
unit of which it was not known then (no rank used it) always gathers both. What is wanted and not there is brought when
it is asked for, by the module's hooks or by the layer itself: correct as long as all ranks ask, and beside nothing.

While only the backward's side is here, the parameters of the bucket show that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.fsdp.fp8.quantize import Quantized
from harness.fsdp.fp8.tile_scales import TileScales
from harness.fsdp.storage.layout import contiguous_strides

FORWARD, BACKWARD = 1, 2
"""Directions, which are added."""
BOTH = FORWARD + BACKWARD
BACKWARD_SIDE = " backward"
"""What labels of a backward's side add to the bucket's name."""


@dataclass(eq=False)
class Side:
    """One tensor of compute weights of a bucket.

    directions: of the products that take them. whole: shape [bucket], once the bucket has storage. resting: compute
    weights that are there between uses: all of them, or this inner shard's; None: there are none. is_here: whether
    `whole` has its contents now. suffix: what labels of its gathers add to the bucket's name.
    """

    directions: int
    whole: Tensor = field(default_factory=lambda: torch.empty(0))
    resting: Tensor | None = None
    is_here: bool = False
    suffix: str = field(init=False)

    def __post_init__(self) -> None:
        self.suffix = BACKWARD_SIDE if self.directions == BACKWARD else ""


@dataclass(eq=False)
class Place:
    """One payload of one weight.

    side: it is in. first: element of the bucket that it begins at. shape: [out, in], of this rank's portion. scales: of
    it.
    """

    side: Side
    first: int
    shape: tuple[int, int]
    scales: TileScales

    def read(self) -> Quantized:
        """The payload as it is, a view."""
        whole = self.side.whole
        view = whole.as_strided(self.shape, contiguous_strides(self.shape), whole.storage_offset() + self.first)
        return Quantized(view, self.scales.inverse.float(), self.scales.tile)


class TwoPayloads:
    """What a layer multiplies of a weight with two payloads, see [Note: Two payloads]."""

    ask: Callable[[int], None] | None = None
    """Told which direction is wanted; brings its side, where only the other one is here. *Collective* there."""

    def __init__(self, forward: Place, backward: Place) -> None:
        self._places = forward, backward

    def __call__(self, *, turned: bool) -> Quantized:
        """The payload for a product with the weight, or with its transpose; as the weight [out, in] lies."""
        place = self._places[turned]
        if self.ask is not None:
            self.ask(place.side.directions)
        return place.read()
