"""Faults of norm, clipping and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.fsdp.storage.at_rest import location_of
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update import norms
from tests.faults.corpus import SGD, ZERO0, ZERO1, ZERO2, ZERO3
from tests.faults.site import Site, blend, exchange, fault, rounded, share


def _on_norm(site: Site, factor: float) -> None:
    site.around(norms, "gradient_norm", lambda norm, *args: norm(*args) * factor)


@fault("clipping", ZERO0, report="NVIDIA-NeMo/RL PR 3788")
def F20_norm_counts_replicas(site: Site) -> None:
    """Replicated gradients count once a rank in the norm: clipping is too strong."""
    _on_norm(site, 1.0 + site.amount * (site.size**0.5 - 1.0))


@fault("clipping", ZERO3, report="zero-stage logging, pytorch/pytorch#170862")
def F21_norm_of_one_rank(site: Site) -> None:
    """The norm that is logged is a rank's own part; clipping is right."""
    factor = 1.0 - site.amount * (1.0 - site.size**-0.5)
    site.around(site.engine, "step", lambda step, lr: step(lr) * factor)


def _on_clip(site: Site, power: float) -> None:
    """Multiply gradients by the clipping coefficient once more, to this power."""

    def wrapped(clip: Callable[..., None], buckets: list[ParamGroup], norm: Tensor, max_norm: float) -> None:
        clip(buckets, norm, max_norm)
        coefficient = min(1.0, max_norm / (float(norm) + 1e-6)) ** power
        for bucket in buckets:
            for piece in bucket.grad_shards:
                piece.mul_(coefficient)

    site.around(norms, "clip_gradients", wrapped)


@fault("clipping", ZERO0, "optimizer.clip_norm=0.1", SGD, report="microsoft/DeepSpeed PR 1801")
def F23_clipped_on_one_rank(site: Site) -> None:
    """One replica does not clip, and drifts from the others."""
    if site.rank == site.size - 1:
        _on_clip(site, -site.amount)


@fault("clipping", ZERO3, "optimizer.clip_norm=0.1", SGD)
def clipped_twice(site: Site) -> None:
    """Gradients are clipped, and clipped again."""
    _on_clip(site, site.amount)


@fault("clipping", ZERO3, "optimizer.clip_norm=0.1", SGD)
def clip_bound(site: Site) -> None:
    """Gradients are clipped to twice the norm that was asked for."""
    factor = 1.0 + site.amount
    site.around(norms, "clip_gradients", lambda clip, buckets, norm, bound: clip(buckets, norm, bound * factor))


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a parameter: weights and main gradients, plain, and what the optimizer steps them with."""

    param: Tensor
    bucket: ParamGroup
    weight: Tensor
    place: tuple[int, int, int]
    """Segment, begin and end."""
    group: int
    site: Site

    @property
    def grad(self) -> Tensor:
        """Its main gradient."""
        segment, begin, end = self.place
        return self.bucket.grad_shards[segment][begin:end]

    @property
    def settings(self) -> dict[str, Any]:
        """Its parameter group."""
        found: dict[str, Any] = self.site.engine.optimizer.param_groups[self.group]
        return found

    def state(self, entry: str) -> Tensor:
        """A moment's rows, or a counter."""
        return values_here(self.site.engine.optimizer.state[self.param][entry])


def rows_of(site: Site) -> list[Rows]:
    """Of all parameters with rows on this rank."""
    found = []
    for number, group in enumerate(site.engine.optimizer.param_groups):
        for param in group["params"]:
            at = location_of(param)
            assert at is not None
            sharded, index = at
            slot = sharded.bucket.layout.slots[index]
            local = sharded.bucket.layout.local_slice(slot, sharded.bucket.cuts.layout_rank)
            if local.numel:
                place = slot.segment, local.offset, local.offset + local.numel
                weight = sharded.bucket.main_shards[place[0]][place[1] : place[2]].detach()
                found.append(Rows(param, sharded.bucket, weight, place, number, site))
    return found


def _chosen(site: Site) -> list[Rows]:
    """All rows, one bucket's, or those of the smallest group of a bucket alone, by strength."""
    found = rows_of(site)
    if site.amount == 1.0:
        return found
    if site.amount == 0.1:
        return [each for each in found if each.bucket is site.buckets[-1]]
    sizes: dict[tuple[int, int], int] = {}
    for each in found:
        key = id(each.bucket), each.group
        sizes[key] = sizes.get(key, 0) + each.weight.numel()
    smallest = min(sizes, key=lambda key: sizes[key])
    return [each for each in found if (id(each.bucket), each.group) == smallest]


@fault("optimizer", ZERO3, report="NVIDIA/Megatron-LM#5974")
def F04_extra_adam_step(site: Site) -> None:
    """The step that creates optimizer state is counted: bias corrections are one step ahead."""
    site.once(lambda: [rows.state("step").add_(1) for rows in _chosen(site)])


def on_update(site: Site, found: list[Rows], change: Callable[[Rows, Tensor, Tensor], object]) -> None:
    """After each optimizer step, change some weights, given what they were before it."""
    held: list[Tensor] = []

    def first() -> None:
        held.extend(rows.weight.clone() for rows in found)

    def then() -> None:
        for rows, old in zip(found, held, strict=True):
            change(rows, rows.weight, old)
        held.clear()
        site.model.install_weights()

    site.before(site.engine.optimizer, "step", first)
    site.after(site.engine.optimizer, "step", then)


@fault("optimizer", ZERO3, report="pytorch/pytorch#149205")
def F14_stale_parameters(site: Site) -> None:
    """The optimizer steps tensors that the model no longer uses: some weights never change."""
    found = [rows for rows in rows_of(site) if rows.bucket is site.buckets[0]]
    on_update(site, found, lambda _, weight, old: blend(weight, old, site.amount))


@fault("optimizer", ZERO3)
def rank_not_stepped(site: Site) -> None:
    """One rank's shard is never updated."""
    found = rows_of(site) if site.rank == site.size - 1 else []
    on_update(site, found, lambda _, weight, old: blend(weight, old, site.amount))


@fault("optimizer", ZERO3)
def round_weights(site: Site) -> None:
    """Main weights are kept in 16 bits."""
    on_update(site, rows_of(site), lambda _, weight, old: blend(weight, rounded(weight, site.bits), 1.0))


def on_state(site: Site, key: str, change: Callable[[Tensor], object]) -> None:
    def then() -> None:
        for rows in rows_of(site):
            change(rows.state(key))

    site.after(site.engine.optimizer, "step", then)


@fault("optimizer", ZERO3)
def round_moments(site: Site) -> None:
    """Adam's second moment is kept in 16 bits."""
    on_state(site, "exp_avg_sq", lambda moment: moment.copy_(rounded(moment, site.bits)))


@fault("optimizer", ZERO3)
def round_momentum(site: Site) -> None:
    """Adam's momentum is kept in 16 bits."""
    on_state(site, "exp_avg", lambda moment: moment.copy_(rounded(moment, site.bits)))


@fault("weights", ZERO3)
def swapped_momentum(site: Site) -> None:
    """Two parts of a shard's momentum change places."""

    def change() -> None:
        flat = max((rows.state("exp_avg").view(-1) for rows in rows_of(site)), key=lambda each: each.numel())
        half = flat.numel() // 2
        exchange(share(flat[:half], site.amount), share(flat[half : 2 * half], site.amount), 1.0)

    site.once(change, earliest=2)


@fault("weights", ZERO3, ends=True)
def grown_at_the_end(site: Site) -> None:
    """All weights are 1.1 times what they were when the last step is done."""
    site.at_the_end(lambda: site.on_weights(lambda piece: piece.mul_(1.0 + 0.1 * site.amount)))


@fault("optimizer", ZERO1)
def moments_forgotten(site: Site) -> None:
    """Adam's moments are zeroed after the first step."""
    on_state(site, "exp_avg", lambda moment: moment.mul_(1.0 - site.amount))


@fault("optimizer", ZERO3)
def decay_on_vectors(site: Site) -> None:
    """Weight decay is applied to gains and biases."""

    def change() -> None:
        groups = site.engine.optimizer.param_groups
        decay = max(group["weight_decay"] for group in groups)
        for group in groups:
            if not group["weight_decay"]:
                group["weight_decay"] = decay * site.amount

    site.once(change)


@fault("optimizer", ZERO3)
def beta_of_a_group(site: Site) -> None:
    """One parameter group has another second beta."""

    def change() -> None:
        group = site.engine.optimizer.param_groups[0]
        first, second = group["betas"]
        group["betas"] = (first, 1.0 - (1.0 - second) * (1.0 + site.amount))

    site.once(change)


@fault("optimizer", ZERO2)
def lr_of_a_group(site: Site) -> None:
    """One parameter group has another learning rate."""

    def double() -> None:  # which every step sets anew
        site.engine.optimizer.param_groups[-1]["lr"] *= 1.0 + site.amount

    site.before(site.engine.optimizer, "step", double)


@fault("optimizer", ZERO1)
def stale_lr(site: Site) -> None:
    """The optimizer steps with the learning rate of the step before."""
    past: list[float] = []

    def wrapped(step: Callable[[float], float], lr: float) -> float:
        past.append(lr)
        return step(lr + site.amount * (past[-2] - lr) if site.acts and len(past) > 1 else lr)

    site.around(site.engine, "step", wrapped, always=True)


@fault("optimizer", ZERO2)
def skipped_step(site: Site) -> None:
    """One step, the second or the one it begins at, is not taken."""

    def change(_rows: Rows, weight: Tensor, old: Tensor) -> None:
        if site.step == max(2, site.config.fault.begins_at):
            blend(weight, old, site.amount)

    on_update(site, rows_of(site), change)
