"""Faults of weights that are kept in 8 bits: of their scales and their payloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.fp8.linear import layers_of
from harness.fp8.quantize import Quantized
from harness.fsdp.storage import codec
from tests.faults.corpus import FP8_CURRENT, HELD, TWO_BY_TWO, ZERO3
from tests.faults.site import Site, blend, fault, share


def _around_amaxes(site: Site, instead: Callable[[Any, Sequence[Tensor]], Any]) -> None:
    """Put something else in place of a share of what ranks agree on as the largest magnitudes."""

    def wrapped(take: Callable[..., None], comm: Any, tensors: Sequence[Tensor]) -> None:
        wrong = [each.clone() for each in tensors]
        take(comm, tensors)
        if comm is not None:
            instead(comm, wrong)
        for each, other in zip(tensors, wrong, strict=True):
            blend(each, other, site.amount)

    site.around(codec, "_take_largest", wrapped)


@fault("gather", ZERO3, FP8_CURRENT, recipes=HELD)
def amax_of_one_rank(site: Site) -> None:
    """Scales of 8-bit weights are made of the largest magnitude among a rank's own rows."""
    _around_amaxes(site, lambda comm, wrong: None)


@fault(
    "gather",
    "sharding=hsdp",
    *TWO_BY_TWO,
    FP8_CURRENT,
    recipes=HELD,
    report="NVIDIA/TransformerEngine#656, pytorch/ao PR 590",
)
def F29_amax_over_the_wrong_group(site: Site) -> None:
    """Largest magnitudes are reduced over the replicas instead of the ranks that cut the weight."""
    outer = site.model.engine.meshes.dense.outer
    take = codec._take_largest
    _around_amaxes(site, lambda comm, wrong: take(outer, wrong))


@fault("gather", ZERO3, FP8_CURRENT, recipes=("current", "block"))
def stale_scale(site: Site) -> None:
    """8-bit weights are cast under the scales of the step before."""
    for bucket in site.buckets:
        for _, scales in getattr(bucket.codec, "weights", ()):
            _keep_scale(site, scales)


def _keep_scale(site: Site, kept: Any) -> None:
    before = kept.scale.clone()

    def revert() -> None:
        now = kept.scale.clone()
        if site.acts:
            blend(kept.scale, before, site.amount)
            kept.inverse.copy_(kept.scale.reciprocal())
        before.copy_(now)

    site.after(kept, "take", revert, always=True)


@fault("gather", ZERO3, FP8_CURRENT, recipes=HELD)
def stale_transposed_payload(site: Site) -> None:
    """The backward multiplies by the transposed weight as it was cast a step before."""
    for layer in layers_of(site.model.module):
        held: dict[str, Tensor] = {}

        def wrapped(
            weight_for: Callable[..., Quantized], held: dict[str, Tensor] = held, *, transposed: bool
        ) -> Quantized:
            found = weight_for(transposed=transposed)
            if not transposed:
                return found
            held["now"] = found.payload.t().contiguous().view(torch.uint8).clone()
            if not site.acts or "before" not in held:
                return found
            mixed = held["now"].clone().view(-1)
            share(mixed, site.amount).copy_(share(held["before"].view(-1), site.amount))
            payload = mixed.view(held["now"].shape).view(found.payload.dtype)
            return Quantized(payload.t(), found.scale_inv, found.tile)

        def turn(held: dict[str, Tensor] = held) -> None:
            if "now" in held:
                held["before"] = held["now"]

        site.around(layer, "weight_for", wrapped, always=True)
        site.after(site.engine, "step", turn, always=True)
