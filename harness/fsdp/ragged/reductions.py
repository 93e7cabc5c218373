"""Reductions of a `RaggedTensor`: of this rank's rows, then of all ranks' results."""

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
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim})
EXTREMES: dict[Any, Callable[..., Tensor]] = {
    aten.amax.default: torch.amax,
    aten.amin.default: torch.amin,
    aten.max.default: torch.amax,
    aten.min.default: torch.amin,
}
NORM = aten.linalg_vector_norm.default
REDUCTIONS = SUMS | EXTREMES.keys() | {NORM}


def reduction_of(func: Any, args: tuple[Any, ...]) -> Rule | None:
    """The rule of a reduction of all elements; None for others."""
    if func not in REDUCTIONS:
        return None
    like, at = args[0], 2 if func is NORM else 1
    dim = args[at] if len(args) > at else None
    dims = range(like.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if len({each % max(like.dim(), 1) for each in dims}) < like.dim():
        return None
    return _extreme if func in EXTREMES else _norm if func is NORM else _sum


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    like, dtype = args[0], kwargs.get("dtype")
    wide = dtype or (torch.float32 if like.dtype.is_floating_point and like.dtype.itemsize < 4 else None)
    total = _over_ranks([like], lambda local: local.sum(dtype=wide), torch.sum)[0]
    if func in (aten.mean.default, aten.mean.dim):
        total = total / like.numel()
    elif not like.dtype.is_floating_point:
        return _shaped(total, like, args[2:3])
    return _shaped(total.to(dtype or like.dtype), like, args[2:3])


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    order = args[1] if len(args) > 1 else 2
    return _shaped(_norms_of([args[0]], order, kwargs.get("dtype"))[0], args[0], args[3:4])


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


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _shaped(extremes([args[0]], EXTREMES[func])[0], args[0], args[2:3])


def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return _scalars(extremes(args[0], torch.amax), args[0])


def extremes(tensors: Sequence[Tensor], reduce: Callable[..., Tensor]) -> list[Tensor]:
    """The largest (`torch.amax`) or smallest element of each tensor, NaN where one is. Collective over each mesh."""

    def of_rows(local: Tensor) -> Tensor:
        return reduce(local) if local.numel() else local.new_full((), _least(local.dtype, reduce is torch.amax))

    return _over_ranks(tensors, of_rows, reduce)


def _least(dtype: torch.dtype, negative: bool) -> float:
    if dtype is torch.bool:
        return not negative
    if dtype.is_floating_point:
        return -math.inf if negative else math.inf
    return torch.iinfo(dtype).min if negative else torch.iinfo(dtype).max


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


def _shaped(value: Tensor, like: RaggedTensor, keepdim: Sequence[bool] = ()) -> DTensor:
    found = replicated(value.reshape([1] * like.dim()) if any(keepdim) else value, like.device_mesh)
    return cast(DTensor, Replicated.of(found)) if like.requires_grad and torch.is_grad_enabled() else found


def _scalars(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    made: dict[tuple[DeviceMesh, torch.dtype], DTensor] = {}
    found: list[Tensor] = []
    for value, each in zip(values, tensors, strict=True):
        if isinstance(each, RaggedTensor):
            key = (each.device_mesh, value.dtype)
            value = made[key] = replicated(value, each.device_mesh, made.get(key))
        found.append(value)
    return found
