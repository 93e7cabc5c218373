"""Norms of a `RaggedTensor`: of this rank's rows, then of all ranks' results; and which reductions are of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from harness.fsdp.ragged.tensor import RaggedTensor, Replicated, replicated
from harness.private_torch import local_tensor

aten = torch.ops.aten
SUMS = frozenset(
    {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
    | {aten.amax.default, aten.amin.default, aten.max.default, aten.min.default}
)
NORM = aten.linalg_vector_norm.default


def reduces_all(func: Any, args: tuple[Any, ...]) -> bool:
    """True for a reduction of all elements."""
    if func is not NORM and func not in SUMS:
        return False
    like, at = args[0], 2 if func is NORM else 1
    dim = args[at] if len(args) > at else None
    dims = range(like.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return bool(len({each % max(like.dim(), 1) for each in dims}) == like.dim())


def norm_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    like, order = args[0], args[1] if len(args) > 1 else 2
    value = _norms_of([like], order, kwargs.get("dtype"))[0]
    return into_loss(replicated(value.reshape([1] * like.dim()) if any(args[3:4]) else value, like.device_mesh), like)


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
            dist.all_gather_into_tensor(parts, values, group=mesh.get_group(axis))
            values = combine(parts.view(mesh.size(axis), -1), dim=0)
        for place, value in zip(where, values.unbind(), strict=True):
            found[place] = value
    return found


def into_loss(found: Tensor, like: Tensor) -> Tensor:
    """A reduction of `like` that a rank's own loss may be added to."""
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
