"""Faults of gradients and weights that tensor parallelism has left whole, or has cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from harness.fsdp.storage import gradients
from harness.fsdp.storage.param_group import ParamGroup
from tests.faults.corpus import GATHERS, SEQUENCE, TP, TWO_BY_TWO, ZERO3
from tests.faults.site import Site, exchange, fault
from tests.faults.summed import on_pieces
from tests.faults.weights import on_landed


@fault("gradient", ZERO3, *TP, SEQUENCE, tensor_parallel=True)
def tp_gradient_reduced_twice(site: Site) -> None:
    """Gradients of weights that tensor parallelism left whole are summed over its ranks once more. Ranks hold the
    same gradient of such a weight, so a sum of them is as many times as large."""
    factor = 1.0 + site.amount * (site.config.mesh.tp - 1)
    _on_tp_shards(site, lambda param, found, _: found * factor if _is_whole(param) else found)


@fault("gradient", ZERO3, *TP, SEQUENCE, tensor_parallel=True)
def sequence_parallel_norm_not_reduced(site: Site) -> None:
    """A norm's gradient is that of a tensor-parallel rank's own positions."""
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


@fault("gather", ZERO3, *TP, SEQUENCE, tensor_parallel=True, strategies=GATHERS)
def strided_shard_in_plain_order(site: Site) -> None:
    """Rows that two axes have cut are gathered as if the outer one had cut them first.

    In each gathered bucket the parts of the first two data-parallel ranks have changed places, as far as they have
    one length.
    """

    def swap(bucket: ParamGroup, _others: list[Tensor]) -> None:
        for part in bucket.cuts.inner_parts(bucket.compute):
            exchange(part.chunk(0), part.chunk(1), site.amount)

    on_landed(site, swap)


@fault("reduction", "sharding=hfsdp", *TWO_BY_TWO, report="NVIDIA/Megatron-LM PR 5972, review")
def F27_outer_finalize_wrong(site: Site) -> None:
    """The sum over the outer axis of HFSDP is divided by one factor too few. Powers of two on an exact average made
    it plain that this was no rounding."""
    factor = 1.0 + site.amount * (site.config.mesh.dp_outer - 1)
    on_pieces(site, lambda piece: piece.mul_(factor), site.buckets)
