"""Faults of the optimizer's rule, and of weights that it is not alone to change."""

from __future__ import annotations

from torch import Tensor

from tests.faults.corpus import SGD, ZERO1, ZERO2, ZERO3
from tests.faults.site import Site, blend, fault_2, rounded
from tests.faults.update import Rows, on_update, rows_of


@fault_2("optimizer", ZERO3, report="bitsandbytes-foundation/bitsandbytes PR 2040")
def F41_decay_after_update(site: Site) -> None:
    """Weights decay after the update instead of before, and the update with them."""

    def change(rows: Rows, weight: Tensor, old: Tensor) -> None:
        settings = rows.settings
        decay = settings["lr"] * settings["weight_decay"]
        weight.sub_(weight - old * (1.0 - decay), alpha=decay * site.amount)

    on_update(site, rows_of(site), change)


@fault_2("optimizer", ZERO2)
def epsilon_inside_root(site: Site) -> None:
    """Adam's epsilon is added to the second moment instead of to its root."""

    def change(rows: Rows, weight: Tensor, old: Tensor) -> None:
        settings = rows.settings
        first, second = (
            rows.state(entry).view(-1) / (1.0 - beta ** float(rows.state("step")))
            for entry, beta in zip(("exp_avg", "exp_avg_sq"), settings["betas"], strict=True)
        )
        kept = old * (1.0 - settings["lr"] * settings["weight_decay"])
        blend(weight, kept - settings["lr"] * first / (second + settings["eps"]).sqrt(), site.amount)

    on_update(site, rows_of(site), change)


@fault_2("optimizer", ZERO1, report="microsoft/DeepSpeed PR 482")
def F42_decay_through_moments(site: Site) -> None:
    """Weight decay goes through the gradient and the moments, as Adam has it and AdamW has not."""
    decays = [group["weight_decay"] for group in site.engine.optimizer.param_groups]

    def change() -> None:
        for group, decay in zip(site.engine.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay * (1.0 - site.amount)

    def first() -> None:
        for rows in rows_of(site):
            rows.grad.add_(rows.weight, alpha=decays[rows.group] * site.amount)

    site.once(change)
    site.before(site.engine.optimizer, "step", first)


@fault_2("optimizer", ZERO2, SGD)
def damped_momentum(site: Site) -> None:
    """Momentum takes in a tenth of each gradient instead of all of it."""
    groups = site.engine.optimizer.param_groups
    site.once(lambda: [group.update(dampening=site.amount * group["momentum"]) for group in groups])


@fault_2("weights", ZERO3, report="aqlaboratory/openfold PR 90")
def F43_average_left_in(site: Site) -> None:
    """Averaged weights that were put in for a validation are left in."""
    averages = [piece.detach().clone() for bucket in site.buckets for piece in bucket.main_shards]

    def pieces() -> list[Tensor]:
        return [piece for bucket in site.buckets for piece in bucket.main_shards]

    def follow() -> None:
        for average, piece in zip(averages, pieces(), strict=True):
            average.lerp_(piece, 0.1)

    def change() -> None:
        for average, piece in zip(averages, pieces(), strict=True):
            blend(piece, average, site.amount)
        site.model.install_weights()

    site.after(site.engine, "step", follow, always=True)
    site.once(change, earliest=3)


@fault_2("weights", ZERO2, ends=True)
def rounded_at_the_end(site: Site) -> None:
    """Weights are cast to 16 bits where they lie when they are exported."""

    site.at_the_end(lambda: site.on_weights(lambda piece: piece.copy_(rounded(piece, site.bits))))
