"""Edits of weights that a forward makes without a trace, and that end with it.

[Note: Edits without a trace] `weight.data.clamp_()` inside a forward is an edit that torch counts nowhere, as it gives
`data` a counter of its own. Where whole weights are made anew for each forward, gathered or cast from main weights, it
lasts for that forward alone, and the program never learns. Only the bits tell: they are summed, as integers, when
weights are whole, and once more when their unit's call is over. Gathered bits are the same on all ranks, and so are the
edits of such programs: all ranks raise in the same call. A program that edits in its forward does so in every one, so
it is enough to look before the first update and after 10, 100, 1000 of them and so on; where work is queued, before the
first alone, as a look stops the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.edits import bits_of

LOOKED_AT = frozenset([0, *(10**power for power in range(1, 12))])
"""Numbers of updates after which forwards are looked at."""


class LostEdits:
    """Looks whether a forward has edited weights that are not kept.

    Args:
        device: where weights lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._looked_at = frozenset([0]) if is_queued(device) else LOOKED_AT
        self.looks = False
        """Whether the forward that runs is one of those that are looked at."""
        self._seen: dict[str, tuple[Bucket, Tensor]] = {}
        """By name: buckets that are whole, and sums of their parameters' bits."""

    def begin(self, buckets: Iterable[Bucket], num_updates: int, *, may_look: bool) -> None:
        """A forward begins, after so many updates of the weights.

        may_look: it has gradients, and the program is not where its edits count (`gathered`).
        """
        self._seen.clear()
        self.looks = may_look and num_updates in self._looked_at
        if self.looks:  # of a gather that is under way, storage is there and weights are not
            self.note(bucket for bucket in buckets if bucket.is_resident)

    def note(self, buckets: Iterable[Bucket]) -> None:
        """What runs next uses these buckets, which no gather is filling; those that are whole are as they should be."""
        for bucket in buckets:
            kept = bucket.computes_with_main_weights
            if not kept and bucket.name not in self._seen and bucket.is_whole and bucket.awaited is None:
                self._seen[bucket.name] = bucket, _sums(bucket)

    def check(self, buckets: Iterable[Bucket]) -> None:
        """A call that used these buckets is over.

        Raises:
            RuntimeError: weights were edited in it, which would be lost.
        """
        for bucket in buckets:
            found = self._seen.pop(bucket.name, None)
            if found is not None and bucket.is_whole:
                _refuse_edited(bucket, found[1])

    def end(self) -> None:
        """The forward is over. Raises as `check`."""
        self.looks = False
        self.check([bucket for bucket, _ in self._seen.values()])


@torch.no_grad()
def _sums(bucket: Bucket) -> Tensor:
    """A sum of the bits of every parameter, modulo 2^64: int64, shape [parameters]."""
    return torch.stack([_words(view).sum() for _, view in bucket.named_slices(bucket.compute)])


def _words(values: Tensor) -> Tensor:
    """Bits as 64-bit words, which are summed many times faster than shorter ones, where they divide into such."""
    flat = values.reshape(-1)
    return flat.view(torch.int64) if flat.nbytes % 8 == 0 and flat.numel() else bits_of(flat)


def _refuse_edited(bucket: Bucket, before: Tensor) -> None:
    differs = (_sums(bucket) != before).tolist()
    edited = [name for (name, _), each in zip(bucket.params, differs, strict=True) if each]
    if edited:
        raise RuntimeError(
            f"parameter {edited[0]} was edited inside a forward (through .data, say), and weights are made anew for"
            " each: the edit would be lost with this one. Edit it between steps, inside `with model.unsharded():`, on"
            " all ranks; or compute with an edited copy, as F.linear(x, self.weight.clamp(min=0))"
        )
