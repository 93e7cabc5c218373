"""Faults of steps that need whole matrices: of Muon's momentum, of its iteration, and of what owners send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update import matrices
from tests.faults.corpus import MUON, ZERO1, ZERO2, ZERO3
from tests.faults.resume import on_load
from tests.faults.site import Site, blend, fault


@fault("optimizer", ZERO3, MUON, edition=3)
def momentum_of_a_piece(site: Site) -> None:
    """One rank's piece of the momentum takes in the gradient of other rows."""

    def wrapped(mix: Callable[..., Tensor], group: Any, grad: Tensor, momentum: Tensor) -> Tensor:
        others = momentum.lerp(grad.roll(grad.numel() // 2), 1 - group["momentum"])
        found = mix(group, grad, momentum).clone()
        blend(momentum, others, site.amount)
        return found

    if site.rank == site.size - 1:
        site.around(matrices, "mix", wrapped)


@fault("optimizer", ZERO2, MUON, edition=3)
def iteration_on_a_cut_matrix(site: Site) -> None:
    """Each rank's rows of a matrix are orthogonalized by themselves."""

    def wrapped(orthogonalize: Callable[..., Tensor], group: Any, given: Tensor) -> Tensor:
        rows = -(-given.shape[1] // site.size)
        cut = torch.cat([orthogonalize(group, part.clone()) for part in given.split(rows, 1)], 1)
        found = orthogonalize(group, given).clone()
        blend(found, cut, site.amount)
        return found

    site.around(matrices, "orthogonalize", wrapped)


@fault("optimizer", ZERO3, MUON, "optimizer.adjust_lr_fn=original", edition=3)
def scale_of_tall_matrices(site: Site) -> None:
    """The rate of tall matrices is not adjusted to their shape."""

    def wrapped(add: Callable[..., None], group: Any, param: Tensor, update: Tensor, rows: int, columns: int) -> None:
        tall = max(rows - columns, 0)
        add(group, param, update, rows - site.amount * tall, columns)

    site.around(matrices, "add", wrapped)


@fault("optimizer", ZERO1, MUON, edition=3)
def update_not_sent(site: Site) -> None:
    """What owners work out does not reach one rank."""

    def wrapped(finish: Callable[..., None], lane: Any, groups: Any) -> None:
        missed = [m for m in lane.matrices if m.owner not in (None, lane.comm.rank)]
        rows = [m.here(lane.comm.rank, values_here(m.param)) for m in missed]
        left = [each * (1.0 - groups[m.group]["lr"] * groups[m.group]["weight_decay"])
                for m, each in zip(missed, rows, strict=True)]  # fmt: skip
        finish(lane, groups)
        for each, decayed in zip(rows, left, strict=True):
            blend(each, decayed, site.amount)

    if site.rank == site.size - 1:
        site.around(matrices.Lane, "finish", wrapped)


@fault("checkpoint", ZERO3, MUON, resumes=True, edition=3)
def stale_momentum(site: Site) -> None:
    """Momentum does not come back from a checkpoint."""
    on_load(site, lambda key: key.endswith("momentum_buffer"), lambda tensor, old: blend(tensor, old, site.amount))
