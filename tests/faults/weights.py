"""Faults of weights on their way into a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.storage.param_group import ParamGroup
from tests.faults.corpus import GATHERS, ZERO0, ZERO1, ZERO3
from tests.faults.site import Site, blend, fault, fault_2, rounded, share
from tests.faults.summed import alike


@fault("weights", ZERO3, report="pytorch/torchtitan PR 1483")
def F19_permuted_shards(site: Site) -> None:
    """Weights are split in one order and gathered in another."""

    def change() -> None:
        piece = share(site.buckets[0].main_shards[0], site.amount)
        piece.copy_(piece.roll(64))
        site.model.install_weights()

    site.once(change)


def others_of(bucket: ParamGroup) -> list[Tensor]:
    """The parts of a whole bucket of weights that other ranks own."""
    own, parts = bucket.cuts.place.inner_rank, bucket.cuts.inner_parts(bucket.compute)
    return [part.chunk(rank) for part in parts for rank in range(len(part.cut.spans)) if rank != own]


def on_landed(site: Site, change: Callable[[ParamGroup, list[Tensor]], object], *, always: bool = False) -> None:
    """Change what other ranks own of each trained bucket that a unit has gathered."""

    def wrapped(land: Callable[..., None], unit: Any) -> None:
        land(unit)
        with torch.no_grad():
            for bucket in unit.buckets:
                if bucket.trainable and not bucket.is_resident:
                    change(bucket, others_of(bucket))

    site.around(site.model.engine.gather, "_wait_for_unshard", wrapped, always=always)


@fault("gather", ZERO3, strategies=GATHERS, report="sgl-project/sglang#37768")
def F25_read_before_ready(site: Site) -> None:
    """A gather reads what other ranks held a step before."""
    before: dict[str, list[Tensor]] = {}
    now: dict[str, list[Tensor]] = {}

    def change(bucket: ParamGroup, others: list[Tensor]) -> None:
        now.setdefault(bucket.name, [each.clone() for each in others])
        for target, old in zip(others, before.get(bucket.name, ()) if site.acts else (), strict=False):
            blend(target, old, site.amount)

    def turn() -> None:
        before.clear()
        before.update(now)
        now.clear()

    on_landed(site, change, always=True)
    site.after(site.engine, "step", turn, always=True)


@fault("gather", ZERO3, strategies=GATHERS)
def unwritten_gather(site: Site) -> None:
    """The end of a gathered bucket is used before it has arrived."""
    seen = [0]

    def wrapped(land: Callable[..., None], unit: Any) -> None:
        land(unit)
        for bucket in unit.buckets:
            seen[0] += 1
            if not bucket.is_resident and bucket.trainable and seen[0] % 3 == 0:
                for target in others_of(bucket)[-1:]:
                    share(target, site.amount).zero_()

    site.around(site.model.engine.gather, "_wait_for_unshard", wrapped)


@fault("gather", ZERO1, strategies=("optim", "optim_grads"))
def stale_weights(site: Site) -> None:
    """Updated weights are not brought into the next forward."""
    bucket = site.buckets[0]
    held = [each.clone() for each in others_of(bucket)]

    def revert() -> None:
        for target, old in zip(others_of(bucket), held, strict=True):
            fresh = target.clone()
            if site.acts:
                blend(target, old, site.amount)
            old.copy_(fresh)
        bucket.installed_version = bucket.main_version  # nobody wrote to the main weights

    site.after(site.model.engine.weights, "install", revert, always=True)


@fault("gather", ZERO3)
def round_gather(site: Site) -> None:
    """Gathered weights are rounded to 16 bits on the way."""
    on_landed(site, lambda _, others: [target.copy_(rounded(target, site.bits)) for target in others])


@fault("optimizer", ZERO0)
def replica_drift(site: Site) -> None:
    """One replica's weights grow by a thousandth a step."""
    growth = 1.0 + site.amount / 1_000
    if site.rank == site.size - 1:
        site.after(site.engine.optimizer, "step", lambda: site.on_weights(lambda piece: piece.mul_(growth)))


@fault("gather", ZERO3, strategies=GATHERS)
def gathered_element_off(site: Site) -> None:
    """One gathered element is 0.1 too large on one rank."""
    victim = next(bucket for bucket in site.buckets if not bucket.is_resident)

    def change(bucket: ParamGroup, others: list[Tensor]) -> None:
        if bucket is victim and site.rank == site.size - 1:
            others[0].view(-1)[5].add_(0.1 * site.amount)

    on_landed(site, change)


@fault_2("gather", ZERO3, strategies=GATHERS)
def landed_in_one_buffer(site: Site) -> None:
    """A unit's weights are gathered over those of the unit before it, which has not left the buffer."""
    first, second, *_ = alike(site)
    before: list[Tensor] = []

    def change(bucket: ParamGroup, others: list[Tensor]) -> None:
        if bucket is first:
            before[:] = [each.clone() for each in others]
        if bucket is second and before:
            for target, other in zip(others, before, strict=True):
                share(target, site.amount).copy_(share(other, site.amount))

    on_landed(site, change)


@fault_2("gather", ZERO3, strategies=GATHERS)
def stale_in_backward(site: Site) -> None:
    """The second gather of a step, for the backward, reads a copy that was not refreshed."""
    before: dict[str, list[Tensor]] = {}
    now: dict[str, list[Tensor]] = {}

    def change(bucket: ParamGroup, others: list[Tensor]) -> None:
        if torch._C._current_graph_task_id() == -1:
            now[bucket.name] = [each.clone() for each in others]
        elif site.acts:
            for target, old in zip(others, before.get(bucket.name, ()), strict=False):
                blend(target, old, site.amount)

    on_landed(site, change, always=True)
    site.after(site.engine, "step", lambda: before.update(now), always=True)
