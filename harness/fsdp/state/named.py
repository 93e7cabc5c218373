"""State of a model and its optimizers by the module's own names, and as this rank's own flat rows.

Keys are `weights/<parameter>` (main weights; compute weights of frozen parameters), `optimizer/<parameter>/<entry>` and
`fp8/<layer>.<buffer>` (delayed scaling, unsharded and in place). Tensors with the parameter's shape are DTensors over
the engine's own memory, plain ones where nothing cuts them. Counters such as `step` are plain tensors of shape [], one
a parameter, and belong to the caller until `adopt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.ragged.tensor import local_of
from harness.fsdp.storage.layout import Slot
from harness.fsdp.storage.param_group import ParamGroup

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
COUNTER_DTYPE = torch.float32
NOTHING = "nothing"  # entry of a parameter that no step has updated yet
Opt = torch.optim.Optimizer
Held = tuple[ParamGroup, Slot, Tensor, Opt]


class StateMismatch(ValueError, RuntimeError):
    """Names or shapes differ; nothing was loaded. torch raises a RuntimeError."""


def check_fit(pairs: Sequence[tuple[str, Tensor, Tensor]], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """pairs: name, own tensor, given one. Raises StateMismatch."""
    problems = [
        f"{n} is {list(given.shape)}, the model's {list(o.shape)}" for n, o, given in pairs if given.shape != o.shape
    ]
    problems += [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch(f"state does not fit the model, nothing was loaded: {'; '.join(problems[:8])}{more}")


@dataclass
class ShardedState:
    """tensors: the state itself, and copies of counters. taking_back: keys of copies, and their setters."""

    tensors: dict[str, Tensor]
    taking_back: list[tuple[str, Callable[[Tensor], None]]] = field(default_factory=list)

    def adopt(self) -> None:
        for key, take in self.taking_back:
            take(self.tensors[key])


def held_by(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> Iterator[Held]:
    owner = {id(param): each for each in optimizers for group in each.param_groups for param in group["params"]}
    for bucket in buckets:
        for slot, param in zip(bucket.layout.slots, bucket.views.at_rest, strict=True):
            if id(param) in owner:
                yield bucket, slot, param, owner[id(param)]


def _is_moment(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and (value.dim() > 0 or type(value) is type(param))


def add_optimizers(found: ShardedState, buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> None:
    for _, slot, param, optimizer in held_by(buckets, optimizers):
        held = optimizer.state.get(param) or {}
        for entry, value in held.items():
            key = f"{OPTIMIZER}{slot.spec.name}/{entry}"
            if _is_moment(value, param):
                found.tensors[key] = value.detach()
            elif value is not None:
                found.tensors[key] = (
                    value.detach().to("cpu", copy=True)
                    if isinstance(value, Tensor)
                    else torch.tensor(float(value), dtype=COUNTER_DTYPE)
                )
                found.taking_back.append((key, _setter(held, entry)))


def _setter(held: dict[str, Any], entry: str) -> Callable[[Tensor], None]:
    def take(value: Tensor) -> None:
        if isinstance(held[entry], Tensor):
            held[entry].copy_(value)
        else:
            held[entry] = type(held[entry])(value.item())

    return take


# -- this rank's own ---------------------------------------------------------------------------------------------------


def local_state(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt]) -> dict[str, Tensor]:
    state = _weights(buckets)
    for bucket, slot, param, optimizer in held_by(buckets, optimizers):
        prefix, held = f"{OPTIMIZER}{slot.spec.name}/", optimizer.state.get(param) or {}
        values = {prefix + key: _flat(value, param) for key, value in held.items() if value is not None}
        if bucket.trainable:
            state |= values or {prefix + NOTHING: torch.empty(0)}
    return state


def _weights(buckets: Sequence[ParamGroup]) -> dict[str, Tensor]:
    return {f"{WEIGHTS}{b.name}:{index}": shard.detach() for b in buckets for index, shard in enumerate(b.main_shards)}


def _flat(value: Any, param: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return local_of(value).reshape(-1) if _is_moment(value, param) else value


def load_local_state(buckets: Sequence[ParamGroup], optimizers: Sequence[Opt], state: Mapping[str, Tensor]) -> None:
    """Put back what `local_state` gave on the same layout.

    Raises:
        ValueError: a key is missing, unexpected, or of another shape or dtype; nothing was loaded.
    """
    weights = _weights(buckets)
    held = {f"{OPTIMIZER}{each[1].spec.name}/": each for each in held_by(buckets, optimizers) if each[0].trainable}
    saved: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in held}
    for key in state:
        prefix, slash, entry = key.rpartition("/")
        saved.setdefault(prefix + slash, {})[entry] = state[key]
    entries: dict[int, set[str]] = {}
    for prefix, (*_, optimizer) in held.items():
        entries.setdefault(id(optimizer), set()).update(saved[prefix].keys() - {NOTHING})
    expected = {key: (shard.shape, shard.dtype) for key, shard in weights.items()}
    for prefix, each in held.items():
        keys = {NOTHING} if NOTHING in saved[prefix] else entries[id(each[-1])] or {NOTHING}
        expected |= {prefix + key: _expected(each, key, saved[prefix].get(key)) for key in keys}
    problems = [f"missing {key}" for key in expected if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in expected]
    for key, (shape, dtype) in expected.items():
        if (given := state.get(key)) is not None and (given.shape, given.dtype) != (shape, dtype):
            problems.append(f"{key} is {tuple(given.shape)} {given.dtype}, not {tuple(shape)} {dtype}")
    if problems:
        raise ValueError("state does not fit this layout, nothing was loaded: " + "; ".join(problems[:8]))
    for key, shard in weights.items():
        shard.copy_(state[key])
    for prefix, (_, _, param, optimizer) in held.items():
        _load(param, optimizer, {key: value for key, value in saved[prefix].items() if key != NOTHING})


def _expected(held: Held, key: str, given: Tensor | None) -> tuple[torch.Size, torch.dtype]:
    bucket, _, param, optimizer = held
    if key == NOTHING:
        return torch.Size([0]), torch.float32
    own = (optimizer.state.get(param) or {}).get(key)
    given = torch.empty(0, dtype=bucket.dtypes.main) if given is None else given
    dtype = own.dtype if isinstance(own, Tensor) else bucket.dtypes.main if given.dim() else given.dtype
    return torch.Size([local_of(param).numel()] if given.dim() else []), dtype


def _load(param: Tensor, optimizer: Opt, values: Mapping[str, Tensor]) -> None:
    if not values:
        optimizer.state.pop(param, None)
        return
    held = optimizer.state[param]
    for key in held.keys() - values.keys():
        del held[key]
    for key, value in values.items():
        if value.dim():
            if not isinstance(held.get(key), Tensor):
                held[key] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
            rows = local_of(held[key])
            rows.copy_(value.view(rows.shape))
        else:
            is_plain = key in held and not isinstance(held[key], Tensor)
            held[key] = type(held[key])(value) if is_plain else value.clone()
