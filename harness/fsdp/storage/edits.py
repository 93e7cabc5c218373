"""Edits of unsharded weights by the program: main weights take them, or they are refused.

Where main weights are the compute weights, an edit of one is an edit of the other. Elsewhere main weights
take what differs from them when cast: of weights that stay unsharded at the end of a forward or backward, of gathered
ones at the end of `unsharded()`. Any other edit that torch counts is refused.

torch does not count an edit through `.data` inside a forward. Only bits tell: they are summed, as integers, when
weights are unsharded, and again after their unit's call. Gathered bits and such edits are the same on all ranks, so
that all raise in the same call. The sums are made before the first update and after 10, 100, 1000 of them and so on;
where work is queued, before the first alone, since reading a sum stops the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.storage.param_group import ParamGroup

LOOKED_AT = frozenset([0, *(10**power for power in range(1, 12))])


def adopt(bucket: ParamGroup) -> None:
    if bucket.is_resident and not bucket.computes_with_main_weights and bucket.views.edited():
        take_over(bucket, differing(bucket))
        bucket.views.forget_edits()


def refuse_lost(bucket: ParamGroup) -> None:
    edited = [] if bucket.computes_with_main_weights else bucket.views.edited()
    if edited:
        raise RuntimeError(
            f"parameter {edited[0]} was edited in place while it was unsharded, between a forward and the end of its"
            f" backward: its main weights ({bucket.dtypes.main}) do not know, and would overwrite it. Edit it between"
            " steps, or inside `with model.unsharded():` before the forward"
        )


def differing(bucket: ParamGroup) -> list[Tensor]:
    """Masks of this rank's compute weights with other bits than main weights cast: bool, one a segment.

    Only while compute weights are unsharded. Empty where main weights are the compute weights.
    """
    if bucket.computes_with_main_weights:
        return []
    pairs = zip(_own_compute_weights(bucket), bucket.cast_shards(bucket.encodings[0]), strict=True)
    return [_bits_of(seen) != _bits_of(main.detach().to(seen.dtype)) for seen, main in pairs]


def take_over(bucket: ParamGroup, differing: Sequence[Tensor]) -> None:
    """Copy compute weights to main weights in these places; elsewhere main weights keep all their bits."""
    if bucket.codec is not None:
        if any(bool(places.any()) for places in differing):
            raise RuntimeError(
                f"a weight of {bucket.name} was edited in place: it is kept in 8 bits, quantized from main weights"
                f" ({bucket.dtypes.main}), which cannot follow. Change those instead, by load_state_dict()"
            )
        return
    for seen, main, places in zip(_own_compute_weights(bucket), bucket.main_shards, differing, strict=False):
        main.detach().copy_(torch.where(places, seen.to(main.dtype), main.detach()))


def _own_compute_weights(bucket: ParamGroup) -> list[Tensor]:
    own = bucket.cuts.own_shards(bucket.cuts.inner_shards(bucket.compute))
    return [shard.to(bucket.main_shards[0].device) for shard in own]


def _bits_of(values: Tensor) -> Tensor:
    return values.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[values.itemsize])


class LostEdits:
    def __init__(self, device: torch.device) -> None:
        self._looked_at = frozenset([0]) if is_queued(device) else LOOKED_AT
        self.looks = False
        self._seen: dict[str, tuple[ParamGroup, Tensor]] = {}

    def begin(self, buckets: Iterable[ParamGroup], num_updates: int, *, may_look: bool) -> None:
        self._seen.clear()
        self.looks = may_look and num_updates in self._looked_at
        if self.looks:  # of a gather that is under way, storage is there and weights are not
            self.note(bucket for bucket in buckets if bucket.is_resident)

    def note(self, buckets: Iterable[ParamGroup]) -> None:
        for bucket in buckets:
            kept = bucket.computes_with_main_weights
            if not kept and bucket.name not in self._seen and bucket.is_whole and not bucket.awaited:
                self._seen[bucket.name] = bucket, _sums(bucket)

    def check(self, buckets: Iterable[ParamGroup]) -> None:
        for bucket in buckets:
            found = self._seen.pop(bucket.name, None)
            if found is not None and bucket.is_whole:
                _refuse_edited(bucket, found[1])

    def end(self) -> None:
        self.looks = False
        self.check([bucket for bucket, _ in self._seen.values()])


@torch.no_grad()
def _sums(bucket: ParamGroup) -> Tensor:
    """int64, shape [parameters], modulo 2^64."""
    return torch.stack([_words(view).sum() for _, view in bucket.named_slices(bucket.compute)])


def _words(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return flat.view(torch.int64) if flat.nbytes % 8 == 0 and flat.numel() else _bits_of(flat)


def _refuse_edited(bucket: ParamGroup, before: Tensor) -> None:
    differs = (_sums(bucket) != before).tolist()
    edited = [name for (name, _), each in zip(bucket.params, differs, strict=True) if each]
    if edited:
        raise RuntimeError(
            f"parameter {edited[0]} was edited inside a forward (through .data, say), and weights are made anew for"
            " each: the edit would be lost with this one. Edit it between steps, inside `with model.unsharded():`, on"
            " all ranks; or compute with an edited copy, as F.linear(x, self.weight.clamp(min=0))"
        )
