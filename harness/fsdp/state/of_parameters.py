"""State of optimizers over sharded parameters, by parameter: handed out by name, or as this rank's own rows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.ragged.tensor import local_of
from harness.fsdp.state.named import COUNTER_DTYPE, OPTIMIZER, ShardedState
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.layout import LocalSlice, Slot

NOTHING = "nothing"
"""In place of the entries of a parameter that no step has updated yet."""
STEP_DTYPE = torch.float64
"""Plain numbers of an optimizer's state (torch keeps `step` as a tensor or a number) are saved as this."""
Opt = torch.optim.Optimizer
Held = tuple[Bucket, Slot, Tensor, Opt]
"""A parameter's bucket and slot, the parameter, and the optimizer that updates it."""


def held_by(buckets: Sequence[Bucket], optimizers: Sequence[Opt]) -> Iterator[Held]:
    """Every parameter that an optimizer has, in the order of the model."""
    owner = {id(param): each for each in optimizers for group in each.param_groups for param in group["params"]}
    for bucket in buckets:
        sharded = bucket.views.sharded()
        assert isinstance(sharded, ShardedParameters)
        for slot, param in zip(bucket.layout.slots, sharded.params, strict=True):
            if id(param) in owner:
                yield bucket, slot, param, owner[id(param)]


def is_moment(value: Any, param: Tensor) -> bool:
    """A state entry has a number an element; else one for the parameter."""
    return isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or type(value) is type(param))


def add_optimizers(found: ShardedState, buckets: Sequence[Bucket], optimizers: Sequence[Opt]) -> None:
    """Add what optimizers keep: moments themselves, copies of counters, which `ShardedState.adopt` takes back."""
    for _, slot, param, optimizer in held_by(buckets, optimizers):
        held = optimizer.state.get(param) or {}
        for entry, value in held.items():
            key = f"{OPTIMIZER}{slot.spec.name}/{entry}"
            if is_moment(value, param):
                found.tensors[key] = value.detach()
            elif value is not None:
                copied = isinstance(value, Tensor)
                found.tensors[key] = (
                    value.detach().to("cpu", copy=True) if copied else torch.tensor(float(value), dtype=COUNTER_DTYPE)
                )
                found.counters.add(key)
                found.taking_back.append((key, _setter(held, entry)))


def _setter(held: dict[str, Any], entry: str) -> Callable[[Tensor], None]:
    def take(value: Tensor) -> None:
        if isinstance(held[entry], Tensor):
            held[entry].copy_(value)
        else:
            held[entry] = type(held[entry])(value.item())

    return take


# -- this rank's own ---------------------------------------------------------------------------------------------------


def local_state(buckets: Sequence[Bucket], optimizers: Sequence[Opt]) -> dict[str, Tensor]:
    """This rank's main weights and optimizer state as flat tensors; keys name bucket, segment and range.

    A parameter that no step has updated yet has an empty tensor where others have state.
    """
    state = _weights(buckets)
    found = list(_own(buckets, optimizers))
    some = any(held for *_, held in found)
    for bucket, local, param, _, held in found:
        name = f"{OPTIMIZER}{bucket.name}:{local.segment}:{local.offset}-{local.offset + local.numel}/"
        for key, value in held.items():
            if is_moment(value, param):
                state[name + key] = local_of(value).reshape(-1)
            elif value is not None:
                state[name + key] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=STEP_DTYPE)
        if some and not held:
            state[name + NOTHING] = torch.empty(0)
    return state


def load_local_state(buckets: Sequence[Bucket], optimizers: Sequence[Opt], state: Mapping[str, Tensor]) -> None:
    """Put back what `local_state` gave on the same layout, also what was saved of longer runs of parameters.

    Raises:
        ValueError: a key is missing, unexpected, or of another shape or dtype; nothing was loaded.
    """
    weights = _weights(buckets)
    problems = [f"missing {key}" for key in weights if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in weights and not key.startswith(OPTIMIZER)]
    for key, shard in weights.items():
        if key in state and (state[key].shape, state[key].dtype) != (shard.shape, shard.dtype):
            given = state[key]
            problems.append(f"{key} is {tuple(given.shape)} {given.dtype}, not {tuple(shard.shape)} {shard.dtype}")
    saved = saved_stretches(state)
    places = _by_place(saved)
    plan = []
    for bucket, local, param, optimizer, held in _own(buckets, optimizers):
        within = _containing(places.get(f"{bucket.name}:{local.segment}", ()), local)
        if within is None and saved:
            problems.append(f"missing {OPTIMIZER}{bucket.name}:{local.segment}:{local.offset}")
        elif within is not None:
            problems += _of_another_dtype(within, held, bucket.dtypes.main)
        plan.append((local, param, optimizer, within))
    wanted = {f"{bucket.name}:{local.segment}" for bucket, local, *_ in _own(buckets, optimizers)}
    problems += [f"unexpected {OPTIMIZER}{each.name}" for each in saved if each.where not in wanted]
    problems += _incomplete(saved)
    if problems:
        raise ValueError("state does not fit this layout, nothing was loaded: " + "; ".join(problems[:8]))
    for key, shard in weights.items():
        shard.copy_(state[key])
    for local, param, optimizer, within in plan:
        _load(local, param, optimizer, within)
    _count_elsewhere(buckets, optimizers)


@dataclass(frozen=True)
class SavedStretch:
    """What was saved of neighbours. where: bucket and segment. begin, end: their place in the segment's shard."""

    name: str
    where: str
    begin: int
    end: int
    values: dict[str, Tensor]


def saved_stretches(state: Mapping[str, Tensor]) -> list[SavedStretch]:
    """The stretches of a saved state, and those of its keys that name none, with no place."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(OPTIMIZER):
            name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
            by_name.setdefault(name, {})[entry] = value
    return [_saved_stretch(name, values) for name, values in by_name.items()]


def _saved_stretch(name: str, values: dict[str, Tensor]) -> SavedStretch:
    found = re.fullmatch(r"(.*:\d+):(\d+)-(\d+)", name)
    return SavedStretch(name, *(found[1], int(found[2]), int(found[3])) if found else (name, 0, 0), values)


def _weights(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    return {f"weights/{b.name}:{index}": shard.detach() for b in buckets for index, shard in enumerate(b.main_shards)}


def _own(
    buckets: Sequence[Bucket], optimizers: Sequence[Opt]
) -> Iterator[tuple[Bucket, LocalSlice, Tensor, Opt, dict[str, Any]]]:
    """Parameters with rows on this rank, and their state."""
    for bucket, slot, param, optimizer in held_by(buckets, optimizers):
        local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
        if local.numel and bucket.trainable:
            yield bucket, local, param, optimizer, optimizer.state.get(param) or {}


def _by_place(saved: Sequence[SavedStretch]) -> dict[str, list[SavedStretch]]:
    """What was saved of each segment, in order; there may be thousands."""
    found: dict[str, list[SavedStretch]] = {}
    for each in sorted(saved, key=lambda each: each.begin):
        found.setdefault(each.where, []).append(each)
    return found


def _containing(saved: Sequence[SavedStretch], local: LocalSlice) -> SavedStretch | None:
    place = bisect_right(saved, local.offset, key=lambda each: each.begin) - 1
    return saved[place] if place >= 0 and local.offset + local.numel <= saved[place].end else None


def _incomplete(saved: Sequence[SavedStretch]) -> list[str]:
    keys = {key for each in saved for key in each.values if key != NOTHING}
    found = []
    for each in saved:
        if NOTHING not in each.values:
            found += [f"missing {OPTIMIZER}{each.name}/{key}" for key in keys - each.values.keys()]
        for key, value in each.values.items():
            if value.dim() and key != NOTHING and value.shape != (each.end - each.begin,):
                found.append(f"{OPTIMIZER}{each.name}/{key} has shape {tuple(value.shape)}")
    return found


def _of_another_dtype(saved: SavedStretch, held: Mapping[str, Any], main: torch.dtype) -> list[str]:
    found = []
    for key, value in saved.values.items():
        own = held.get(key)
        wanted = own.dtype if isinstance(own, Tensor) else main if value.dim() else value.dtype
        if key != NOTHING and value.dtype != wanted:
            found.append(f"{OPTIMIZER}{saved.name}/{key} is {value.dtype}, not {wanted}")
    return found


def _load(local: LocalSlice, param: Tensor, optimizer: Opt, within: SavedStretch | None) -> None:
    values = {} if within is None else {key: value for key, value in within.values.items() if key != NOTHING}
    if not values:
        optimizer.state.pop(param, None)
        return
    assert within is not None
    held = optimizer.state[param]
    for key in held.keys() - values.keys():
        del held[key]
    for key, value in values.items():
        if value.dim():
            if not isinstance(held.get(key), Tensor):
                held[key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
            begin = local.offset - within.begin
            rows = local_of(held[key])
            rows.copy_(value[begin : begin + local.numel].view(rows.shape))
        else:
            held[key] = (
                value.clone() if isinstance(held.get(key), Tensor) or key not in held else type(held[key])(value)
            )


def _count_elsewhere(buckets: Sequence[Bucket], optimizers: Sequence[Opt]) -> None:
    """Parameters without a row on this rank have entries as those with some, and their counters; all in the order of
    the groups, which is one on all ranks."""
    some = {id(optimizer): (param, held) for _, _, param, optimizer, held in _own(buckets, optimizers) if held}
    for bucket, slot, param, optimizer in held_by(buckets, optimizers):
        here = bucket.layout.local_slice(slot, bucket.cuts.layout_rank).numel
        if here or id(optimizer) not in some or not (bucket.trainable and param.requires_grad):
            continue
        other, held = some[id(optimizer)]
        own = optimizer.state[param]
        for key, value in held.items():
            if not is_moment(value, other):
                own[key] = value.clone() if isinstance(value, Tensor) else value
            elif key not in own:
                own[key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
    for optimizer in optimizers:
        found = dict(optimizer.state)
        optimizer.state.clear()
        params = [param for group in optimizer.param_groups for param in group["params"] if param in found]
        optimizer.state.update({param: found.pop(param) for param in params} | found)
