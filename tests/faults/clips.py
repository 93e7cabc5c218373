"""Faults of clipping: by whose norm, of which gradients, and when it was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update import norms
from tests.faults.corpus import SGD, ZERO1, ZERO2, ZERO3
from tests.faults.site import Site, fault_2
from tests.faults.update import rows_of


def _squares(pieces: Sequence[Tensor]) -> Tensor:
    """Sum of squares: fp64, shape []."""
    return torch.stack([piece.double().square().sum() for piece in pieces]).sum()


def _clipped_by(site: Site, choose: Callable[[list[ParamGroup], Tensor], Tensor]) -> None:
    """Clip by a blend of the norm and another one; the norm that is logged is right."""

    def wrapped(clip: Callable[..., None], buckets: list[ParamGroup], norm: Tensor, max_norm: float) -> None:
        other = choose(buckets, norm)
        clip(buckets, torch.lerp(norm, other, site.amount) if site.acts else norm, max_norm)

    site.around(norms, "clip_gradients", wrapped, always=True)


@fault_2(
    "clipping",
    ZERO3,
    "optimizer.clip_norm=0.1",
    SGD,
    strategies=("optim", "optim_grads", "optim_grads_params"),
    report="sgl-project/SpecForge PR 663",
)
def F39_clipped_by_own_norm(site: Site) -> None:
    """Each rank clips by the norm of its own shard."""
    _clipped_by(site, lambda buckets, _: _squares([shard for each in buckets for shard in each.grad_shards]).sqrt())


@fault_2("clipping", ZERO2, "optimizer.clip_norm=0.1", SGD)
def stale_clip(site: Site) -> None:
    """Gradients are clipped by the norm of the step before, which is there already."""
    past: list[Tensor] = []

    def before(_buckets: list[ParamGroup], norm: Tensor) -> Tensor:
        past.append(norm.clone())
        return past[-2] if len(past) > 1 else norm

    _clipped_by(site, before)


@fault_2("clipping", ZERO1, "optimizer.clip_norm=0.1", SGD, report="huggingface/transformers PR 614")
def F40_clipped_by_group(site: Site) -> None:
    """Each parameter group is clipped by its own norm. The norm that is logged is right."""

    def wrapped(_clip: Callable[..., None], _buckets: list[ParamGroup], norm: Tensor, max_norm: float) -> None:
        for group in range(len(site.engine.optimizer.param_groups)):  # of which a rank may have no rows
            found = [rows for rows in rows_of(site) if rows.group == group]
            squares = _squares([norm.new_zeros(1), *(rows.grad for rows in found)])
            if not site.buckets[0].is_whole_everywhere:
                torch.distributed.all_reduce(squares)
            right, own = (_coefficient(each, max_norm) for each in (norm, squares.sqrt()))
            for rows in found:
                rows.grad.mul_(right + site.amount * (own - right))

    site.around(norms, "clip_gradients", wrapped)


def _coefficient(norm: Tensor, max_norm: float) -> float:
    return min(1.0, max_norm / (float(norm) + 1e-6))


@fault_2("clipping", ZERO3, "optimizer.clip_norm=0.1", SGD)
def norm_without_embedding(site: Site) -> None:
    """The norm leaves the embedding's gradient out: clipping is too weak. The first bucket's share of the squares
    is missing."""

    def wrapped(norm: Callable[..., Tensor], buckets: Sequence[ParamGroup], *args: Any) -> Tensor:
        whole = norm(buckets, *args)
        rest = norm([each for each in buckets if each is not site.buckets[0]], *args)
        return torch.lerp(whole.square(), rest.square(), site.amount).sqrt()

    site.around(norms, "gradient_norm", wrapped)
