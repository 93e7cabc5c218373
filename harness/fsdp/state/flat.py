"""Weights and gradients by name: whole, or this rank's own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from harness.fsdp.storage.bucket import Bucket


def full_weights(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main weights of every parameter, whole, on the CPU, one bucket in memory at a time. *Collective.*"""
    return _full(buckets, lambda bucket: bucket.main_shards, "weights")


def full_gradients(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main gradients of every trained parameter, whole, on the CPU, after they were reduced. *Collective.*"""
    return _full([bucket for bucket in buckets if bucket.trainable], lambda bucket: bucket.grad_shards, "gradients")


def local_gradients(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter's main gradient, flat, of the rows that this rank keeps; empty where it has none."""
    for bucket in buckets:
        for slot in bucket.layout.slots:
            local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
            memory = bucket.grad_shards[slot.segment].detach()
            yield slot.spec.name, memory[local.offset : local.offset + local.numel] if local.numel else memory[:0]


def _full(
    buckets: Sequence[Bucket], shards_of: Callable[[Bucket], list[Tensor]], what: str
) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        tensor = bucket.context.tensor
        group = None if tensor is None else tensor.group
        slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
        for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
            yield name, bucket.portion_of(slot).join(view.detach(), group).to("cpu", copy=True)
