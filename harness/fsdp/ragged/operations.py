"""Operations of `RaggedTensor`: what each aten operation does with rows that lie on several ranks.

- element by element: on the rows; a tensor that is cut otherwise is gathered and cut alike first
- norms of all elements: of the rows, then of what all ranks found
- random numbers: drawn for the whole tensor on every rank; those of the mesh's first rank count
- views of the same shape: views; other views show a gathered copy that cannot be written to
- other operations in place would lose the edit, or change rows of other ranks: refused on all ranks
- everything else is computed of the whole tensor, and replicated
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from harness.fsdp.ragged.tensor import (
    BEFORE_WRITE,
    GatheredView,
    RaggedTensor,
    Replicated,
    all_gather,
    meets_plain,
    replicated,
    wrap_rows,
)
from harness.private_torch import local_tensor, schema_of, spec_of, tree_leaves, tree_map_only

CHECK_AND_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"

KEEPS = frozenset(
    """_pin_memory _to_copy alias copy_ detach empty_like fill_.Scalar fill_.Tensor full_like masked_fill_.Scalar
    masked_fill_.Tensor masked_fill.Scalar masked_fill.Tensor ones_like zero_ zeros_like""".split()  # noqa: SIM905
)
"""Row by row, as are operations tagged pointwise, `_foreach_*` and fused kernels."""

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operation; collective over the mesh unless it runs row by row on tensors of one cut.
    NotImplementedError: on all ranks, before any communication: an edit would be lost. RuntimeError: a plain tensor of
    several elements takes part, as torch has it for DTensors."""
    rule = _rule_of(func)
    if schema_of(func).is_mutable:
        _count_edit(func, args, kwargs)
    result = rule(func, args, kwargs)
    if func.is_view and isinstance(result, RaggedTensor):
        result.base = args[0].base
    return result


def _count_edit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment the rows' version counters: below autograd torch counts no edit."""
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]
    rows = [each.base for each in tree_leaves(written) if isinstance(each, RaggedTensor)]
    for before_write in {id(found): found for each in rows if (found := getattr(each, BEFORE_WRITE, None))}.values():
        before_write()
    torch.autograd.graph.increment_version(rows)


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(schema_of(func).arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]


@cache
def _rule_of(func: Any) -> Rule:
    if func.name() in SPECIAL:
        return SPECIAL[func.name()]
    if "c10d" in func.namespace:
        return _refuse
    if any(argument.is_out for argument in schema_of(func).arguments):
        return _into if torch.Tag.pointwise in func.tags else _refuse
    if func.name().startswith(("aten::_foreach_", "aten::_fused_")):
        return _foreach
    if func.name().removeprefix("aten::") in KEEPS or (
        torch.Tag.pointwise in func.tags and func.name() != "aten::equal"
    ):
        return _elementwise
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    if func.is_view:
        return _view_of_whole
    return _refuse if schema_of(func).is_mutable else _of_whole


# -- row by row --------------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like: Any = _decides_rows(args)
    in_place = schema_of(func).is_mutable
    if in_place and isinstance(args[0], DTensor):
        like = args[0]
    elif like is None or in_place:
        return _of_whole(func, args, kwargs)
    cut_plain = func is torch.ops.aten.copy_.default  # loading: every rank has the whole tensor
    local = [_local(each, like, cut_plain) if isinstance(each, Tensor) else each for each in args]
    result = func(*local, **kwargs)
    return args[0] if in_place else wrap_rows(result, like)


def _into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, like = kwargs["out"], _decides_rows(args)
    if like is None or not isinstance(out, RaggedTensor) or not _same_cut(out, like):
        return _refuse(func, args, kwargs)
    local = [_local(each, like) if isinstance(each, Tensor) else each for each in args]
    func(*local, **{**kwargs, "out": local_tensor(out)})
    return out


def _decides_rows(args: Sequence[Any]) -> RaggedTensor | None:
    tensors = [each for each in args if isinstance(each, Tensor)]
    if len(tensors) == 1:
        return tensors[0] if isinstance(tensors[0], RaggedTensor) else None
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    ragged = (each for each in tensors if isinstance(each, RaggedTensor))
    return next((each for each in ragged if each.dim() == len(shape) and each.shape[:1] == shape[:1]), None)


def _local(value: Tensor, like: Tensor, cut_plain: bool = False) -> Tensor:
    if not isinstance(like, DTensor):
        return _whole(value) if isinstance(value, DTensor) else value
    if value is like:
        return local_tensor(like)
    if not isinstance(like, RaggedTensor):  # state that torch loaded, say, in torch's own cut
        whole = _whole(value).expand(like.shape)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
    if isinstance(value, RaggedTensor) and _same_cut(value, like):
        return local_tensor(value)
    return like.rows_of(value if cut_plain and not isinstance(value, DTensor) else _whole(value))


def _same_cut(one: RaggedTensor, other: RaggedTensor) -> bool:
    mine, theirs = spec_of(one), spec_of(other)
    if one.dim() != other.dim() or mine.placements != theirs.placements or mine.mesh != theirs.mesh:
        return False
    if one.shape == other.shape:
        return True
    # columns may be fewer where rows alone are cut
    return one.shape[:1] == other.shape[:1] and all(isinstance(each, Replicate) for each in mine.placements[:-1])


def _whole(value: Tensor) -> Tensor:
    """A plain tensor. Collective for DTensors. Raises RuntimeError for a plain one of several elements."""
    plain: Any = value.detach()
    if isinstance(plain, DTensor):
        return plain.full_tensor()
    if value.numel() > 1:
        raise RuntimeError(meets_plain(value, "a parameter"))
    return value


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    firsts, in_place = args[0], schema_of(func).is_mutable

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            pairs = zip(value, firsts, strict=True)
            return [_local(each, first) if isinstance(each, DTensor) else _whole(each) for each, first in pairs]
        return _whole(value) if isinstance(value, Tensor) else value

    held = DTensor if in_place else RaggedTensor  # what is made of torch's own is torch's
    plain = [local_tensor(each) if isinstance(each, held) else each for each in firsts]
    result = func(plain, *map(local, args[1:]), **{name: local(value) for name, value in kwargs.items()})
    if result is None or in_place:
        return None if result is None else list(firsts)
    pairs = zip(result, firsts, strict=True)
    return [wrap_rows(each, first) if isinstance(first, RaggedTensor) else each for each, first in pairs]


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, size = args[0], tuple(args[1])
    if size == tuple(like.shape):
        return wrap_rows(func(local_tensor(like), local_tensor(like).shape, *args[2:], **kwargs), like)
    return replicated(func(local_tensor(like), size, *args[2:], **kwargs), like.device_mesh)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, size = args[0], args[1]
    if len(size) != like.dim() or any(asked not in (-1, own) for asked, own in zip(size, like.shape, strict=True)):
        return _view_of_whole(func, args, kwargs)
    return wrap_rows(local_tensor(like).view(local_tensor(like).shape), like)


# -- of the whole tensor -----------------------------------------------------------------------------------------------


def _of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:  # under inference_mode
        return decomposed
    like = _first(args, kwargs)
    args, kwargs = tree_map_only(Tensor, _whole, (args, kwargs))
    return tree_map_only(Tensor, lambda found: _computed_of(like, found), func(*args, **kwargs))


def _computed_of(like: RaggedTensor, found: Tensor) -> Tensor:
    """A value computed of all of `like`, as a rank's own loss may take it."""
    made = replicated(found, like.device_mesh)
    return Replicated.of(made) if like.requires_grad and torch.is_grad_enabled() else made


def _view_of_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name(_first(args, kwargs))
    return tree_map_only(Tensor, lambda found: GatheredView.of(found, name), _of_whole(func, args, kwargs))


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drawn unsharded on every rank, so that generators stay alike; the first rank's numbers count."""
    like = _first(args, kwargs)
    mesh = like.device_mesh
    if schema_of(func).is_mutable:
        drawn = func(local_tensor(like).new_empty(like.shape), *tree_map_only(Tensor, _whole, args[1:]), **kwargs)
        local_tensor(like).copy_(like.rows_of(_first_ranks(drawn, mesh)))
        return like
    drawn = func(*tree_map_only(Tensor, _whole, args), **kwargs)
    return tree_map_only(Tensor, lambda each: replicated(_first_ranks(each, mesh), mesh), drawn)


def _first_ranks(value: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis in range(mesh.ndim):
        dist.broadcast(value, group=mesh.get_group(axis), group_src=0)
    return value


# -- norms: of this rank's rows, then of all ranks' results ------------------------------------------------------------


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    defaults: tuple[Any, ...] = (2, None, False)
    like, order, dims, keepdim = args + defaults[len(args) - 1 :]
    if dims and len({dim % max(like.dim(), 1) for dim in dims}) < like.dim():
        return _of_whole(func, args, kwargs)
    value = _norms_of([like], order, kwargs.get("dtype"))[0]
    return _computed_of(like, value.reshape([1] * like.dim()) if keepdim else value)


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    made: dict[tuple[DeviceMesh, torch.dtype], DTensor] = {}
    found = _norms_of(args[0], args[1] if len(args) > 1 else 2, kwargs.get("dtype"))
    for place, each in enumerate(args[0]):
        if isinstance(each, RaggedTensor):
            key = each.device_mesh, found[place].dtype
            found[place] = made[key] = replicated(found[place], each.device_mesh, made.get(key))
    return found


def _norms_of(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Norm of each tensor, of ranks' norms in their order, so that all have the same bits.

    One all-gather for each axis that cuts rows, mesh and dtype; norms of plain tensors are this rank's.
    """
    norm: Any = torch.linalg.vector_norm

    def of_rows(each: Tensor) -> Tensor:
        local = local_tensor(each) if isinstance(each, RaggedTensor) else each
        wide = dtype or (torch.float32 if local.dtype.itemsize < 4 else local.dtype)
        if not local.numel():
            return local.new_full((), math.inf if order < 0 else 0, dtype=wide)
        return cast(Tensor, norm(local, order, dtype=wide))

    found, places = [of_rows(each) for each in tensors], defaultdict[Any, list[int]](list)
    for place, each in enumerate(tensors):
        if isinstance(each, RaggedTensor):
            cuts = tuple(not isinstance(placement, Replicate) for placement in each.placements)
            places[each.device_mesh, cuts, found[place].dtype].append(place)
    for (mesh, cuts, _), where in places.items():
        values = torch.stack([found[place] for place in where]).to(mesh.device_type)
        for axis in (axis for axis, is_cut in enumerate(cuts) if is_cut):
            parts = values.new_empty((mesh.size(axis), len(values)))
            all_gather(parts.view(-1), values, group=mesh.get_group(axis))
            values = parts.sum(0) if order == 0 else norm(parts, order, dim=0)
        for place, value in zip(where, values.unbind(), strict=True):
            found[place] = value
    return [value.to(dtype or each.dtype) for value, each in zip(found, tensors, strict=True)]


# -- others ------------------------------------------------------------------------------------------------------------


def check_and_unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's: unscale what is here; all ranks learn of an infinity on one. Collective over each mesh."""
    grads, found_inf, inv_scale = args
    found_inf = _whole(found_inf)
    func([local_tensor(each) if isinstance(each, DTensor) else each for each in grads], found_inf, _whole(inv_scale))
    for mesh in dict.fromkeys(each.device_mesh for each in grads if isinstance(each, DTensor)):
        for axis in range(mesh.ndim):
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(axis))


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"{func} on {_name(_first(args, kwargs))}, of which each rank has other rows: call it on parameter.to_local(),"
        " this rank's rows; or on parameter.full_tensor() (collective), then parameter.copy_(it); to initialize, use"
        " the module's reset_parameters()"
    )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    return next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RaggedTensor))


def _name(like: RaggedTensor) -> str:
    return like.cut.name or f"a sharded tensor of shape {[*like.shape]}"


SPECIAL: dict[str, Rule] = {
    CHECK_AND_UNSCALE: check_and_unscale,
    "aten::_foreach_max": _of_whole,
    "aten::_foreach_norm.Scalar": _norms,
    "aten::linalg_vector_norm": _norm,
    "aten::is_pinned": lambda _, args, kwargs: local_tensor(args[0]).is_pinned(),
    "aten::is_same_size": lambda _, args, kwargs: args[0].shape == args[1].shape,
    "aten::new_empty": _new,
    "aten::new_full": _new,
    "aten::new_ones": _new,
    "aten::new_zeros": _new,
    "aten::view": _view,
}

RaggedTensor.rules = staticmethod(dispatch)
