"""Which parameters got a gradient on no rank in a step: told by the sums themselves, without a message.

[Note: Negative zero] Where a rank has no gradient of a parameter, it sends -0.0. In IEEE arithmetic (-0.0) + (-0.0) is
-0.0 and x + (-0.0) is x, so -0.0 changes no sum, and is what a sum is if, and only if, every term is. A rank that has a
gradient sees to it that some elements, the *marks*, are not -0.0: the first element that each owner keeps of a
parameter. Whoever owns a part of a parameter finds its mark in its own sums, and all owners find the same.

Casts and factors keep the sign, but might make -0.0 of a negative number that is too small for a format. So a rank that
has a gradient sends +0.0 in place of a mark from -`tiny` to `tiny`, where `tiny` (2^-100 for fp32 and bf16) is so far
above the smallest number that no later rounding makes zero of what is left. No other element is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import BucketLayout, Slot

ABSENT = -0.0
"""What stands for a gradient that never came."""
ROOM = 2.0**26
"""From the smallest normal number of a format to `tiny`: sums that nearly cancel, and factors, have it to shrink."""
LARGEST_TINY = 2.0**-64
"""Formats that would need a larger `tiny` (fp16) would lose gradients that matter."""


def tiny_of(dtypes: Dtypes) -> float:
    """The least size of a negative mark that no rounding on its way turns into zero."""
    return max(torch.finfo(each).tiny for each in (dtypes.grads, dtypes.wire, dtypes.accum)) * ROOM


def can_mark(dtypes: Dtypes) -> bool:
    """Whether these formats have the range for it."""
    return tiny_of(dtypes) <= LARGEST_TINY


class Marks:
    """The marks of one bucket; see [Note: Negative zero]. Parameters go by their place in the bucket.

    Args:
        cuts: how the bucket is cut.
        dtypes: what its gradients are on their way.
        device: where the bucket lies.
    """

    def __init__(self, cuts: Cuts, dtypes: Dtypes, device: torch.device) -> None:
        self.cuts = cuts
        self.tiny = tiny_of(dtypes)
        self._device = device
        self._places = [_places(cuts.layout, slot) for slot in cuts.layout.slots]
        self._all = self._index(range(len(self._places)))

    def _index(self, params: Iterable[int]) -> Tensor:
        places = [place for index in params for place in self._places[index]]
        return torch.tensor(places, dtype=torch.int64, device=self._device)

    def stamp(self, bucket: Tensor, params: Collection[int]) -> None:
        """See to it that the marks of parameters that have a gradient are not -0.0 in a whole bucket.

        In one kernel, for small positive ones, too: nothing that a format of gradients tells from zero is lost.
        """
        index = self._all if len(params) == len(self._places) else self._index(sorted(params))
        values = bucket.index_select(0, index)
        bucket.index_copy_(0, index, hardshrink(values, self.tiny))

    def absent(self, own_shards: Sequence[Tensor], params: Collection[int]) -> set[int]:
        """Read from this rank's sums which of `params` no rank has a gradient of, as far as rows of them lie here."""
        here = [
            (each, self.cuts.layout.local_slice(self.cuts.layout.slots[each], self.cuts.layout_rank)) for each in params
        ]
        held = [(each, own_shards[local.segment][local.offset]) for each, local in here if local.numel]
        if not held:
            return set()
        marks = torch.stack([mark for _, mark in held])
        found = ((marks == 0) & torch.signbit(marks)).tolist()
        return {each for (each, _), is_absent in zip(held, found, strict=True) if is_absent}


def _places(layout: BucketLayout, slot: Slot) -> list[int]:
    """Where in the whole bucket each owner's part of a parameter begins."""
    if not slot.spec.numel:
        return []
    segment = layout.segments[slot.segment]
    each = segment.shard_numel
    cuts = range((slot.offset // each + 1) * each, slot.end, each)  # few of all ranks' bounds lie in one parameter
    return [segment.bucket_offset + begin for begin in (slot.offset, *cuts)]
