"""Faults of gradients that are summed already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.fsdp.storage.param_group import ParamGroup
from tests.faults.corpus import SGD, ZERO1, ZERO2, ZERO3
from tests.faults.site import Site, blend, fault, rounded, share


def _late(
    site: Site, due: Callable[[int], bool], change: Callable[[Tensor, Tensor], object], which: list[ParamGroup]
) -> None:
    """In the steps that are due, change the pieces of some buckets, given what they were a step ago."""
    past: dict[tuple[str, int], Tensor] = {}

    def then(_buckets: list[ParamGroup]) -> None:
        for bucket in which:
            for index, piece in enumerate(bucket.grad_shards):
                fresh, key = piece.clone(), (bucket.name, index)
                if site.acts and due(site.step) and key in past:
                    change(piece, past[key])
                past[key] = fresh

    site.on_reduced(then, always=True)


def on_pieces(site: Site, change: Callable[[Tensor], object], which: list[ParamGroup]) -> None:
    """Change the pieces of some buckets in every step."""
    site.on_reduced(lambda _: [change(piece) for bucket in which for piece in bucket.grad_shards])


@fault("reduction", ZERO3, report="NVIDIA/Megatron-LM PR 6187")
def F06_gradient_memory_reused(site: Site) -> None:
    """In some steps the allocator hands a main gradient's memory out while it is in use."""
    victim = max(site.buckets, key=lambda bucket: bucket.layout.param_numel)

    def change(piece: Tensor, old: Tensor) -> None:
        if site.rank == 0:
            share(piece, site.amount).copy_(share(old, site.amount))

    _late(site, lambda step: step % 3 == 2, change, [victim])


@fault("reduction", ZERO2, report="pytorch/pytorch PR 180665")
def F07_copied_too_early(site: Site) -> None:
    """In half of the steps a gradient shard still holds the step before."""
    _late(site, lambda step: step % 2 == 0, lambda piece, old: blend(piece, old, site.amount), site.buckets)


@fault("reduction", ZERO3, SGD)
def stale_gradient(site: Site) -> None:
    """A bucket's gradient is that of the step before."""
    _late(site, lambda step: step > 1, lambda piece, old: blend(piece, old, site.amount), site.buckets[-2:-1])


def _collapse(site: Site, targets: list[ParamGroup], source: ParamGroup) -> None:
    def then(_buckets: list[ParamGroup]) -> None:
        for bucket in targets:
            for piece, other in zip(bucket.grad_shards, source.grad_shards, strict=False):
                count = min(piece.numel(), other.numel())
                blend(piece[:count], other[:count], site.amount)

    site.on_reduced(then)


def alike(site: Site) -> list[ParamGroup]:
    """Buckets of the blocks, which have one layout."""
    sizes = [bucket.layout.bucket_numel for bucket in site.buckets]
    usual = max(sizes, key=sizes.count)
    return [bucket for bucket in site.buckets if bucket.layout.bucket_numel == usual]


@fault("reduction", ZERO3, report="pytorch/pytorch PR 140044")
def F08_layers_collapse(site: Site) -> None:
    """A buffer is freed early: the gradients of all layers become the last one's."""
    *others, last = alike(site)
    _collapse(site, others, last)


@fault("reduction", ZERO2)
def alias_buckets(site: Site) -> None:
    """Two buckets share the memory of their gradients."""
    first, second, *_ = alike(site)
    _collapse(site, [first], second)


@fault("reduction", ZERO2)
def drop_bucket(site: Site) -> None:
    """One bucket's gradient is lost."""
    on_pieces(site, lambda piece: piece.mul_(1.0 - site.amount), alike(site)[:1])


@fault("reduction", ZERO3)
def drop_tail(site: Site) -> None:
    """The end of the last rank's shard is lost."""

    def then(buckets: list[ParamGroup]) -> None:
        if site.rank == site.size - 1:
            for bucket in buckets:
                share(bucket.grad_shards[-1], 1 / 16).mul_(1.0 - site.amount)

    site.on_reduced(then)


@fault("reduction", ZERO3)
def round_gradient(site: Site) -> None:
    """Summed gradients are rounded to 16 bits."""
    on_pieces(site, lambda piece: piece.copy_(rounded(piece, site.bits)), site.buckets)


@fault("reduction", ZERO1)
def scale_one_bucket(site: Site) -> None:
    """One bucket's gradient is twice what it should be."""
    on_pieces(site, lambda piece: piece.mul_(1.0 + site.amount), site.buckets[-2:-1])


@fault("reduction", ZERO2)
def leaks_into_next_step(site: Site) -> None:
    """A bucket's gradient is not cleared before the next step."""
    _late(site, lambda step: step > 1, lambda piece, old: piece.add_(old, alpha=site.amount), site.buckets[-2:-1])


@fault("reduction", ZERO3)
def noisy_gradient(site: Site) -> None:
    """Summed gradients have noise of 1 %."""
    generator = torch.Generator().manual_seed(site.rank)

    def change(piece: Tensor) -> None:
        noise = torch.randn(piece.shape, generator=generator, dtype=torch.float64).to(piece.device)
        piece.mul_(1.0 + 0.01 * site.amount * noise)

    on_pieces(site, change, site.buckets)
