"""Faults of gradients and weights that tensor parallelism has left whole, or has cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from harness.fsdp.storage import gradients
from harness.fsdp.storage.param_group import ParamGroup
from tests.faults.corpus import SEQUENCE, TP, ZERO3
from tests.faults.site import Site, blend, fault


@fault(
    "gradients of weights that tensor parallelism left whole are summed over its ranks once more",
    "gradient",
    cell=(ZERO3, *TP, SEQUENCE),
    tensor_parallel=True,
)
def tp_gradient_reduced_twice(site: Site) -> None:
    """Ranks hold the same gradient of such a weight, so a sum of them is as many times as large."""
    factor = 1.0 + site.amount * (site.config.mesh.tp - 1)
    _on_tp_shards(site, lambda param, found, _: found * factor if _is_whole(param) else found)


@fault(
    "a norm's gradient is that of a tensor-parallel rank's own positions",
    "gradient",
    cell=(ZERO3, *TP, SEQUENCE),
    tensor_parallel=True,
)
def sequence_parallel_norm_not_reduced(site: Site) -> None:
    _on_tp_shards(site, lambda _, found, term: found if term is None else torch.lerp(found, term, site.amount))


def _is_whole(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) and all(each.is_replicate() for each in param.placements)


def _on_tp_shards(site: Site, change: Callable[[nn.Parameter, Tensor, Tensor | None], Tensor]) -> None:
    """Change gradients that come from autograd, given the parameter and this rank's term where it is but one."""

    def wrapped(gradient_here: Callable[..., Tensor], param: nn.Parameter, gradient: Tensor) -> Tensor:
        term = None
        if isinstance(gradient, DTensor) and any(isinstance(each, Partial) for each in gradient.placements):
            term = gradient._local_tensor.detach().clone()
        return change(param, gradient_here(param, gradient), term)

    site.around(gradients, "gradient_here", wrapped)


@fault(
    "rows that two axes have cut are gathered as if the outer one had cut them first",
    "gather",
    cell=(ZERO3, *TP, SEQUENCE),
    tensor_parallel=True,
    strategies=("optim_grads_params",),
)
def strided_shard_in_plain_order(site: Site) -> None:
    """In each gathered bucket the parts of the first two data-parallel ranks have changed places, as far as they have
    one length."""

    def wrapped(land: Callable[..., None], unit: Any) -> None:
        land(unit)
        with torch.no_grad():
            for bucket in unit.buckets:
                _swap(bucket, site.amount)

    site.around(site.model.engine.gather, "_wait_for_unshard", wrapped)


def _swap(bucket: ParamGroup, amount: float) -> None:
    if bucket.is_resident or not bucket.trainable:
        return
    for part in bucket.cuts.inner_parts(bucket.compute):
        first, second = part.chunk(0), part.chunk(1)
        length = min(first.numel(), second.numel())
        first, second = first[:length], second[:length]
        kept = first.clone()
        blend(first, second.clone(), amount)
        blend(second, kept, amount)


@fault(
    "the sum over the outer axis of HFSDP is divided by one factor too few",
    "reduction",
    cell=("sharding=hfsdp", "mesh=two_by_two", "train.microbatch_size=2"),
    report="NVIDIA/Megatron-LM PR 5972, review",
)
def F27_outer_finalize_wrong(site: Site) -> None:
    """Powers of two on an exact average made it plain that this was no rounding."""
    factor = 1.0 + site.amount * (site.config.mesh.dp_outer - 1)

    def change(buckets: list[ParamGroup]) -> None:
        for bucket in buckets:
            for shard in bucket.grad_shards:
                shard.mul_(factor)

    site.on_reduced(change)
