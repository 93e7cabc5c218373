"""Edits of unsharded weights in place, and how main weights come to know of them.

[Note: Edits] Where main weights are the compute weights, an edit of one is an edit of the other. Elsewhere main weights
take what differs from them when cast: of weights that stay whole at the end of a forward or backward, of gathered ones
at the end of `unsharded()`. Any other edit of an unsharded weight is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.fsdp.storage.bucket import Bucket


def adopt(bucket: Bucket) -> None:
    """Let edits of weights that stay whole count: main weights in storage of their own take them."""
    if bucket.is_resident and not bucket.computes_with_main_weights and bucket.views.edited():
        take_over(bucket, differing(bucket))
        bucket.views.forget_edits()


def refuse_lost(bucket: Bucket) -> None:
    """Raise RuntimeError where a parameter was edited in place and the next update or gather would lose it."""
    edited = [] if bucket.computes_with_main_weights else bucket.views.edited()
    if edited:
        raise RuntimeError(
            f"parameter {edited[0]} was edited in place while it was unsharded, between a forward and the end of its"
            f" backward: its main weights ({bucket.dtypes.main}) do not know, and would overwrite it. Edit it between"
            " steps, or inside `with model.unsharded():` before the forward"
        )


def differing(bucket: Bucket) -> list[Tensor]:
    """Where this rank's compute weights are other bits than its main weights cast, bool, a tensor for each shard.

    Only while compute weights are whole. None for main weights that are the compute weights.
    """
    if bucket.computes_with_main_weights:
        return []
    pairs = zip(own_compute_weights(bucket), bucket.cast_shards(bucket.encodings[0]), strict=True)
    return [bits_of(seen) != bits_of(main.detach().to(seen.dtype)) for seen, main in pairs]


def take_over(bucket: Bucket, differing: Sequence[Tensor]) -> None:
    """Let main weights be what the compute weights are at these places; elsewhere they keep all their bits.

    Raises:
        RuntimeError: weights of 8 bits were edited, of which no main weights follow.
    """
    if bucket.codec.is_lossy:
        if any(bool(places.any()) for places in differing):
            raise RuntimeError(
                f"a weight of {bucket.name} was edited in place: it is kept in 8 bits, quantized from main weights"
                f" ({bucket.dtypes.main}), which cannot follow. Change those instead, by load_state_dict()"
            )
        return
    for seen, main, places in zip(own_compute_weights(bucket), bucket.main_shards, differing, strict=False):
        main.detach().copy_(torch.where(places, seen.to(main.dtype), main.detach()))


def own_compute_weights(bucket: Bucket) -> list[Tensor]:
    """This rank's part of whole compute weights, where its main weights lie."""
    own = bucket.cuts.own_shards(bucket.cuts.inner_shards(bucket.compute))
    return [shard.to(bucket.main_shards[0].device) for shard in own]


def bits_of(values: Tensor) -> Tensor:
    """The bits of each element, as integers."""
    return values.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[values.itemsize])
