"""Norms of a `RaggedTensor`: of this rank's rows, then of all ranks' results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from harness.fsdp.ragged.placement import all_gather
from harness.fsdp.ragged.tensor import RaggedTensor, Replicated, replicated
from harness.private_torch import local_tensor


def norm_of(like: RaggedTensor, order: float, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    value = _norms_of([like], order, dtype)[0]
    return into_loss(replicated(value.reshape([1] * like.dim()) if keepdim else value, like.device_mesh), like)


def norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return _scalars(_norms_of(args[0], args[1] if len(args) > 1 else 2, kwargs.get("dtype")), args[0])


def _norms_of(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    norm: Any = torch.linalg.vector_norm

    def of_rows(local: Tensor) -> Tensor:
        wide = dtype or (torch.float32 if local.dtype.itemsize < 4 else local.dtype)
        if not local.numel():
            return local.new_full((), math.inf if order < 0 else 0, dtype=wide)
        return cast(Tensor, norm(local, order, dtype=wide))

    combine = partial(torch.sum) if order == 0 else partial(norm, ord=order)
    found = _over_ranks(tensors, of_rows, combine)
    return [value.to(dtype or each.dtype) for value, each in zip(found, tensors, strict=True)]


def _over_ranks(
    tensors: Sequence[Tensor], of_rows: Callable[[Tensor], Tensor], combine: Callable[..., Tensor]
) -> list[Tensor]:
    """Reductions of each tensor in the order of ranks, so that all have the same bits.

    One all-gather for each axis that cuts rows, mesh and dtype; plain tensors are reduced here.
    """
    found = [of_rows(local_tensor(each) if isinstance(each, RaggedTensor) else each) for each in tensors]
    places: dict[tuple[DeviceMesh, tuple[bool, ...], torch.dtype], list[int]] = {}
    for place, each in enumerate(tensors):
        if isinstance(each, RaggedTensor):
            cuts = tuple(not isinstance(placement, Replicate) for placement in each.placements)
            places.setdefault((each.device_mesh, cuts, found[place].dtype), []).append(place)
    for (mesh, cuts, _), where in places.items():
        values = torch.stack([found[place] for place in where]).to(mesh.device_type)
        for axis in (axis for axis, is_cut in enumerate(cuts) if is_cut):
            parts = values.new_empty((mesh.size(axis) * len(values),))
            all_gather(parts, values, group=mesh.get_group(axis))
            values = combine(parts.view(mesh.size(axis), -1), dim=0)
        for place, value in zip(where, values.unbind(), strict=True):
            found[place] = value
    return found


def into_loss(found: Tensor, like: Tensor) -> Tensor:
    """A value computed of all of `like`, as a rank's own loss may take it."""
    return Replicated.of(found) if like.requires_grad and torch.is_grad_enabled() else found


def _scalars(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    made: dict[tuple[DeviceMesh, torch.dtype], DTensor] = {}
    found: list[Tensor] = []
    for value, each in zip(values, tensors, strict=True):
        if isinstance(each, RaggedTensor):
            key = (each.device_mesh, value.dtype)
            value = made[key] = replicated(value, each.device_mesh, made.get(key))
        found.append(value)
    return found
