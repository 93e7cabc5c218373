"""Faults of sums: over microbatches, over ranks, and of what they are divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.storage.param_group import ParamGroup
from tests.faults.corpus import (
    ACCUMULATES_SHARDS,
    ACCUMULATES_WHOLE,
    FOUR,
    K2,
    NO_CLIP,
    SGD,
    ZERO0,
    ZERO1,
    ZERO2,
    ZERO3,
)
from tests.faults.site import Site, fault, fault_2, rounded


def _scale(site: Site, factor: float) -> None:
    """Multiply what every gradient is multiplied by."""
    site.once(lambda: setattr(site.reduce, "factor", site.reduce.factor * factor))


def _accumulated(site: Site) -> list[Tensor]:
    return [b.gradients.sums for b in site.buckets if b.gradients is not None and b.placements.accumulates_locally]


def _between_microbatches(site: Site, change: Callable[[Tensor], object]) -> None:
    def then(number: int) -> None:
        if number > 1:
            for gradients in _accumulated(site):
                change(gradients)

    site.each_microbatch(then)


@fault("reduction", ZERO1, *K2, report="NVIDIA/Megatron-LM PR 3067")
def F01_duplicated_gradient(site: Site) -> None:
    """The reduce-scattered shard is added to the unreduced gradient instead of copied over it."""

    def wrapped(fold: Callable[..., None], exchange: Any, into: list[Tensor], *, add: bool) -> None:
        own = torch.cat([part.chunk(site.rank) for part in exchange.parts])
        fold(exchange, into, add=add)
        for target, mine in zip(into, own.split([each.numel() for each in into]), strict=True):
            target.add_(mine.to(target.dtype), alpha=site.amount * exchange.factor)

    for bucket in site.buckets:
        site.around(bucket.inner, "fold", wrapped)


@fault("reduction", ZERO1, *K2, report="NVIDIA/Megatron-LM#6660")
def F02_doubled_each_microbatch(site: Site) -> None:
    """The gradient buffer of a group is doubled once a microbatch."""
    _between_microbatches(site, lambda gradients: gradients.mul_(1.0 + site.amount))
    _scale(site, 1.0 + site.amount)


@fault("reduction", ZERO0, *K2, strategies=ACCUMULATES_WHOLE, microbatches=2, report="NVIDIA/Megatron-LM PR 7186")
def F05_no_sync_without_effect(site: Site) -> None:
    """Each backward begins from zero: only the last microbatch reaches the optimizer."""
    _between_microbatches(site, lambda gradients: gradients.mul_(1.0 - site.amount))


@fault("reduction", ZERO1, *K2, strategies=ACCUMULATES_WHOLE, microbatches=2, report="ISEEKYAN/Megatron-LM#149")
def F11_microbatches_added_in_bf16(site: Site) -> None:
    """Microbatches accumulate in 16 bits before the fp32 reduction."""
    _between_microbatches(site, lambda gradients: gradients.copy_(rounded(gradients, site.bits)))
    on_taken(site, lambda bucket, source: source.copy_(rounded(source, site.bits)))


def on_taken(site: Site, change: Callable[[ParamGroup, Tensor], object], *, always: bool = False) -> None:
    """Change unreduced gradients when a bucket is handed over."""
    for bucket in site.buckets:

        def wrapped(take: Callable[[], Tensor], bucket: ParamGroup = bucket) -> Tensor:
            source = take()
            with torch.no_grad():
                change(bucket, source)
            return source

        site.around(bucket.gradients, "take", wrapped, always=always)


@fault("reduction", ZERO2, *K2, report="microsoft/DeepSpeed#966")
def F13_reduced_before_ready(site: Site) -> None:
    """A bucket leaves before the last gradient of a parameter is in it."""
    last = [False]
    site.each_microbatch(lambda number: last.__setitem__(0, number == site.k))
    victim = max(site.buckets, key=lambda bucket: bucket.layout.param_numel)

    def change(bucket: ParamGroup, source: Tensor) -> None:
        if last[0] and bucket is victim:
            _name, view = max(bucket.named_slices(source), key=lambda item: item[1].numel())
            view.mul_(1.0 - site.amount)

    on_taken(site, change)


@fault("clipping", ZERO3, "model=odd", "mesh.world_size=3", "train.global_batch_size=6", "train.microbatch_size=2")
def garbage_in_padding(site: Site) -> None:
    """What lies between parameters is not zero and counts in the norm."""

    def change(bucket: ParamGroup, source: Tensor) -> None:
        for begin, end in bucket.layout.gaps:
            source[begin:end].fill_(site.amount)

    on_taken(site, change)


def _scaled(index: int, factor: float) -> Callable[[list[Tensor]], list[Tensor]]:
    def change(contributions: list[Tensor]) -> list[Tensor]:
        contributions[index] = contributions[index] * factor
        return contributions

    return change


@fault("reduction", ZERO3, *FOUR)
def drop_rank(site: Site) -> None:
    """The last rank's contribution is lost."""
    site.on_contributions(_scaled(site.size - 1, 1.0 - site.amount))


@fault("reduction", ZERO0, *FOUR)
def repeat_rank(site: Site) -> None:
    """The first rank's contribution counts twice."""
    site.on_contributions(_scaled(0, 1.0 + site.amount))


def _within(site: Site, inside: float, outside: float) -> None:
    """Weigh contributions of this rank's half of the ranks, and of the other half."""
    half = site.rank * 2 // site.size

    def change(contributions: list[Tensor]) -> list[Tensor]:
        weights = [inside if rank * 2 // site.size == half else outside for rank in range(site.size)]
        return [each * weight for each, weight in zip(contributions, weights, strict=True)]

    site.on_contributions(change)


@fault("reduction", ZERO3, *FOUR, report="pytorch/pytorch#140183")
def F22_one_node_only(site: Site) -> None:
    """Hybrid sharding reduces within a node alone."""
    _within(site, 1.0 + site.amount, 1.0 - site.amount)


@fault("reduction", ZERO0, *FOUR)
def inner_group_only(site: Site) -> None:
    """Ranks are summed within pairs and averaged over all."""
    _within(site, 1.0, 1.0 - site.amount)


@fault("reduction", ZERO3, *FOUR, report="pytorch/pytorch#190626")
def F09_half_reduced_in_bf16(site: Site) -> None:
    """One of two axes is reduced in 16 bits: half of the contributions are rounded."""

    def change(contributions: list[Tensor]) -> list[Tensor]:
        half = len(contributions) // 2
        return contributions[:half] + [rounded(each, site.bits) for each in contributions[half:]]

    site.on_contributions(change)


@fault("reduction", ZERO2)
def round_contributions(site: Site) -> None:
    """Contributions are rounded to 16 bits before an fp32 wire."""
    site.on_contributions(lambda contributions: [rounded(each, site.bits) for each in contributions])


@fault("reduction", ZERO3, *FOUR, report="pytorch/pytorch PR 194434")
def F10_ranks_added_in_bf16(site: Site) -> None:
    """Contributions are added in 16 bits where fp32 was asked for."""

    def change(contributions: list[Tensor]) -> list[Tensor]:
        total = rounded(contributions[0], site.bits)
        for each in contributions[1:]:
            total = rounded(total + each, site.bits)
        return [total] + [torch.zeros_like(total) for _ in contributions[1:]]

    site.on_contributions(change)


def _before_adding(site: Site, factor: float) -> None:
    """Scale what a shard has accumulated whenever a microbatch is added to it."""

    def wrapped(fold: Callable[..., None], exchange: Any, into: list[Tensor], *, add: bool) -> None:
        if add:
            for target in into:
                target.mul_(factor)
        fold(exchange, into, add=add)

    for unit in site.reduce.order:
        for bucket in unit.trainable:
            site.around(bucket.inner, "fold", wrapped)


@fault("reduction", ZERO2, *K2, strategies=ACCUMULATES_SHARDS, microbatches=2, report="allenai/open-instruct PR 1498")
def F12_boundary_resets(site: Site) -> None:
    """ZeRO-2 begins to accumulate anew at each microbatch; ZeRO-3 does not."""
    _before_adding(site, 1.0 - site.amount)


@fault("reduction", ZERO2, *K2, SGD, strategies=ACCUMULATES_SHARDS, microbatches=2, report="NVIDIA/Megatron-LM PR 3023")
def F03_nested_division(site: Site) -> None:
    """1/DP is applied to the accumulated shard at every microbatch."""
    _before_adding(site, 1.0 - site.amount * (1.0 - 1.0 / site.size))


@fault("reduction", ZERO3, *K2, microbatches=2, report="huggingface/transformers#34191")
def F24_not_divided_by_k(site: Site) -> None:
    """The loss is not divided by the number of microbatches."""
    _scale(site, 1.0 + site.amount * (site.k - 1))


@fault("reduction", ZERO2, *FOUR)
def scale_by_ranks(site: Site) -> None:
    """Gradients are not divided by the ranks."""
    _scale(site, 1.0 + site.amount * (site.size - 1))


@fault("reduction", ZERO1, SGD, NO_CLIP)
def scale_over_ranks(site: Site) -> None:
    """Gradients are divided by the ranks twice."""
    _scale(site, 1.0 - site.amount * (1.0 - 1.0 / site.size))


@fault_2("reduction", ZERO3)
def offset_scatter(site: Site) -> None:
    """What the first rank sends to the last one's shard lies an element further on."""

    def change(contributions: list[Tensor]) -> list[Tensor]:
        if site.rank == site.size - 1:
            contributions[0] = torch.lerp(contributions[0], contributions[0].roll(1), site.amount)
        return contributions

    site.on_contributions(change)


@fault_2("reduction", ZERO1)
def flushed_to_zero(site: Site) -> None:
    """Gradients below the smallest normal number of fp16 are zero on the wire."""
    limit = site.amount * 2.0**-14
    site.on_contributions(lambda contributions: [each.masked_fill(each.abs() < limit, 0.0) for each in contributions])


@fault_2("reduction", ZERO2)
def flipped_sign(site: Site) -> None:
    """One element of every message changes its sign on the way."""

    def change(contributions: list[Tensor]) -> list[Tensor]:
        if site.rank == 0:
            contributions[-1] = contributions[-1].clone()
            middle = contributions[-1].numel() // 2
            contributions[-1][middle] *= 1.0 - 2.0 * site.amount
        return contributions

    site.on_contributions(change)
