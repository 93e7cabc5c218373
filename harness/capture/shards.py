"""This rank's shard of every tensor, whoever keeps it; nothing is exchanged to find it.

[Note: Who keeps a parameter] Most programs keep it in itself: whole, or as a DTensor with its place (FSDP2, tensor
parallelism, this harness's engine). The others keep a range of its flattened elements in a flat buffer,
which is what their optimizer steps: FSDP1 in a flat parameter of each unit, DeepSpeed ZeRO 1 and 2 in an fp32 partition
of each parameter group, ZeRO 3 in an fp32 buffer of the parameters' own partitions, Megatron-FSDP in a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from harness.probe.step_checks.pieces import Block, Piece, blocks_of, local_part
from harness.probe.step_checks.sketch import Place

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Rows of a parameter under a name of their own, for `watch(parts=)`."""

    name: str
    rows: tuple[int, int] | None = None
    """First row of the parameter and the one after the last; None: all."""
    shape: Shape | None = None
    """Shape of the named tensor; None: that of the rows."""
    at: tuple[int, int] | None = None
    """Row and column of the named tensor where the rows begin; None: they are the whole of it."""


Parts = Callable[[str, Shape], Sequence[Part] | None]
"""Parts of a parameter by its name and shape on this rank; None: it is what its name says."""


@dataclass(frozen=True)
class Shard(Piece):
    """Piece of a tensor in the parameter, or the flat buffer of several, that an optimizer steps."""

    trained: bool = True
    whole: tuple[int, int] | None = None
    """Elements of the parameter's whole gradient that are this tensor's; None: it has only some of them."""

    @property
    def begin(self) -> int:
        """Place of the first element in the flattened tensor."""
        place = self.blocks[0].place
        return place.rows[0] * math.prod(self.shape[1:]) + place.columns[0]


class Found(NamedTuple):
    shards: dict[str, Shard]
    by_parameter: dict[str, tuple[Shape, list[Shard]]]
    """Whole shape and shards of each parameter, by its name in the wrapped model without what wraps it inside."""
    unplaced: dict[str, str]
    """Tensors without a place, and why."""


def find(models: Sequence[nn.Module], optimizer: Any, parts: Parts | None = None) -> Found:
    """Shards by name. Args: optimizer: as `watch` was given it. Raises `ValueError`: two tensors have one name."""
    kept = {**_fsdp1(models), **_megatron(models), **_zero([*models, *several(optimizer)])}
    found = Found({}, {}, {})
    for plain, (raw, param) in named(models).items():
        for name, each in _members(plain, param, kept):
            try:
                base = replace(each, name=name) if isinstance(each, Shard) else Shard.of(name, each)
                base = replace(base, whole=(0, math.prod(base.shape)))
                named_parts = parts(name, base.shape) if parts is not None else None
                shards = [base] if named_parts is None else _parted(base, named_parts)
            except Exception as error:  # of any engine's own kind of DTensor, or of a map
                found.unplaced[name] = f"{type(error).__name__}: {error}"
                base = Shard(name, tuple(param.shape), param, ())
                shards = [base]
            for shard in shards:
                if shard.name in found.shards:
                    raise ValueError(f"two parameters have a tensor {shard.name}: give each a name of its own")
                found.shards[shard.name] = replace(shard, trained=param.requires_grad)
            own = [found.shards[shard.name] for shard in shards]
            found.by_parameter[plain_name(raw) if name == plain else name] = base.shape, own
    return found


def flat_pieces(model: nn.Module, optimizer: Any, states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Piece]:
    """This rank's pieces of weights and moments, as `weights/NAME` and `optimizer/NAME/ENTRY`.

    Args: optimizer: as `find`. states: entries of the optimizer by the holder that it steps.
    """
    found: dict[str, Piece] = {}
    for name, shard in find([model], optimizer).shards.items():
        found[f"weights/{name}"] = shard
        for entry, value in states.get(shard.source, {}).items():
            if local_part(value).shape == local_part(shard.source).shape:  # no count of steps
                key = f"optimizer/{name}/{entry}"
                found[key] = replace(shard, name=key, source=value)
    return found


def several(optimizer: Any) -> list[Any]:
    return [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]


def _members(plain: str, param: Tensor, kept: Mapping[int, Shard]) -> Iterator[tuple[str, Tensor | Shard]]:
    """A parameter, or those that a flat parameter of FSDP1 is made of."""
    if isinstance(param, FlatParameter):
        for name, each in zip(param._fqns, _of_flat(param, None), strict=True):
            yield plain_name(f"{plain.rpartition('.')[0]}.{name}".removeprefix(".")), each
    else:
        yield plain, kept.get(id(param), param)


# -- flat buffers ------------------------------------------------------------------------------------------------------


def _kept(holder: Tensor, shape: Iterable[int], start: int, stop: int, begin: int) -> Shard:
    """Elements `start` to `stop` of a flattened parameter, which lie from `begin` on in a flat buffer."""
    whole = tuple(shape)
    return Shard("", whole, holder, blocks_of(whole, start, stop, begin))


def _fsdp1(models: Iterable[nn.Module]) -> dict[int, Shard]:
    """Parameters that FSDP1 left in their modules (`use_orig_params`): each views its range of a flat parameter."""
    found: dict[int, Shard] = {}
    for module in (each for model in models for each in model.modules()):
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if isinstance(flat, FlatParameter) and flat._params is not None:
            found |= {id(param): each for param, each in zip(flat._params, _of_flat(flat, flat._params), strict=True)}
    return found


def _of_flat(flat: FlatParameter, params: Sequence[Tensor] | None) -> Iterator[Shard]:
    """Args: params: the model's own, whose elements begin with their range; None: the flat parameter's are taken."""
    for number, (shape, info) in enumerate(zip(flat._shapes, flat._shard_param_infos, strict=True)):
        holder = flat if params is None else params[number]
        start, stop, begin = info.intra_param_start_idx, info.intra_param_end_idx, info.offset_in_shard
        if not info.in_shard or start is None or stop is None or begin is None:
            yield _kept(holder, shape, 0, 0, 0)
        else:
            yield _kept(holder, shape, start, stop + 1, begin if params is None else 0)


def _megatron(models: Iterable[nn.Module]) -> dict[int, Shard]:
    """Parameters of Megatron-FSDP: DTensors cut where a bucket is, which no placement says."""
    found = {}
    storages: list[Any] = [getattr(model, "param_and_grad_buffer", None) for model in models]
    for storage in storages:
        for _, param in getattr(storage, "optimizer_named_parameters", ()):
            group = storage.parameter_groups[storage.param_to_param_group[param.orig_param]]
            buffer = group.main_weight_buffer or group.model_weight_buffer
            if buffer is not None and buffer.is_data_distributed:  # else whole
                start, stop = buffer._get_item_slice_in_shard(buffer.param_idx[param.orig_param])
                found[id(param)] = _kept(param, param.shape, start, stop, 0)
    return found


def _zero(owners: Iterable[Any]) -> dict[int, Shard]:
    """Parameters of DeepSpeed's ZeRO. Args: owners: models and optimizers, of which one knows."""
    found: dict[int, Shard] = {}
    zeros: list[Any] = [zero for each in owners for zero in (each, getattr(each, "optimizer", None))]
    for zero in zeros:
        if hasattr(zero, "fp16_partitioned_groups_flat"):
            found |= _zero_3(zero)
        elif hasattr(zero, "single_partition_of_fp32_groups"):
            offsets = zero.round_robin_bit16_offsets
            found |= _zero_2(zero, zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, offsets)
        elif hasattr(zero, "fp32_groups_flat_partition"):
            offsets = [[*accumulate(map(Tensor.numel, params[:-1]), initial=0)] for params in zero.bf16_groups]
            found |= _zero_2(zero, zero.fp32_groups_flat_partition, zero.bf16_groups, offsets)
    return found


def _zero_2(
    zero: Any, flats: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], offsets: Sequence[Sequence[int]]
) -> dict[int, Shard]:
    found = {}
    for flat, params, begins, group in zip(flats, groups, offsets, zero.real_dp_process_group, strict=True):
        low = dist.get_rank(group) * flat.numel()
        for param, offset in zip(params, begins, strict=True):
            first, last = max(low, offset), min(low + flat.numel(), offset + param.numel())
            found[id(param)] = _kept(flat, param.shape, first - offset, last - offset, first - low)
    return found


def _zero_3(zero: Any) -> dict[int, Shard]:
    """Frozen parameters lie in their own partition."""
    found = {}
    for flat, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        begin = 0
        for param in params:
            found[id(param)] = _partition(param, flat, begin)
            begin += param.partition_numel()
    for param in zero.module.parameters():
        found.setdefault(id(param), _partition(param, param.ds_tensor, 0))
    return found


def _partition(param: Any, holder: Tensor, begin: int) -> Shard:
    size = param.partition_numel()
    start = min(dist.get_rank(param.ds_process_group) * size, param.ds_numel)
    return _kept(holder, param.ds_shape, start, min(start + size, param.ds_numel), begin)


# -- a declared map ----------------------------------------------------------------------------------------------------


def _parted(base: Shard, parts: Sequence[Part]) -> list[Shard]:
    """Shards of the named parts of a parameter. Raises `ValueError`: a part does not fit its tensor."""
    width = math.prod(base.shape[1:])
    found: dict[str, Shard] = {}
    for part in parts:
        top, bottom = part.rows or (0, base.shape[0] if base.shape else 1)
        shape = part.shape or (bottom - top, *base.shape[1:])
        if part.at is None and (bottom - top) * width != math.prod(shape):
            raise ValueError(
                f"rows {top} to {bottom} of {list(base.shape)} are not the whole of {list(shape)}: give at="
            )
        blocks = tuple(_moved(base, part, (top, bottom), shape))
        whole = None if part.at else (top * width, bottom * width)
        same = found.get(part.name)
        found[part.name] = Shard(part.name, shape, base.source, (*(same.blocks if same else ()), *blocks), whole=whole)
    return [*found.values()]


def _moved(base: Shard, part: Part, rows: tuple[int, int], shape: Shape) -> Iterator[Block]:
    """Blocks of a parameter as blocks of the named tensor. Raises `ValueError`: they are no blocks of its matrix."""
    width, length = math.prod(base.shape[1:]), math.prod(shape[1:])
    down, right = part.at or (0, 0)
    for place, begin in base.blocks:
        (top, bottom), (left, end) = place.rows, place.columns
        if right or width == length:  # a row is one of the named tensor's
            first, last = max(top, rows[0]), min(bottom, rows[1])
            if first < last:
                there = Place((first - rows[0] + down, last - rows[0] + down), (left + right, end + right))
                yield Block(there, begin + (first - top) * (end - left))
        elif end - left == width or bottom - top == 1:
            of = top * width + left
            start, stop = max(of, rows[0] * width), min(of + place.numel, rows[1] * width)
            shift = down * length - rows[0] * width
            yield from blocks_of(shape, start + shift, stop + shift, begin + start - of)
        else:
            raise ValueError(f"{base.name} is cut in its columns, and {part.name} has rows of another length")


INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which `torch.compile`, checkpointing and FSDP1 keep the module that they wrap."""
OUTSIDE = "module"
"""Name under which DDP and others keep it, stripped where it begins every parameter's name."""


def models_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def named(models: Iterable[nn.Module]) -> dict[str, tuple[str, nn.Parameter]]:
    """By plain name: the name in the wrapped model, and the parameter; a tied one once. Raises `ValueError`: two
    pipeline stages have one name."""
    found: dict[str, tuple[str, nn.Parameter]] = {}
    for model in models:
        params = [(raw, plain_name(raw).split("."), param) for raw, param in model.named_parameters()]
        while params and all(len(parts) > 1 and parts[0] == OUTSIDE for _, parts, _ in params):
            params = [(raw, parts[1:], param) for raw, parts, param in params]
        for raw, parts, param in params:
            if (plain := ".".join(parts)) in found:
                raise ValueError(f"two models have a parameter {plain}: watch each with a run of its own")
            found[plain] = raw, param
    return found


def plain_name(raw: str) -> str:
    return ".".join(part for part in raw.split(".") if part not in INSIDE)
