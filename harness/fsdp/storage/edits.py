"""Edits of unsharded weights by the program: main weights take them, or they are refused.

Where main weights are the compute weights, an edit of one is an edit of the other. Elsewhere main weights take what
differs from them when cast, at the end of `unsharded()`. Any other edit that torch counts is refused; one through
`.data` in place inside a forward, which it does not count, is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.storage.param_group import ParamGroup


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
    pairs = zip(_own_compute_weights(bucket), bucket.cast_shards(), strict=True)
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
