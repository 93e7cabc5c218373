"""From a module to units with storage: who gets which values, and how a module leaves the meta device.

A model too large for one device is built on "meta", without memory. Its values come either from `initial_value`, by
name, or from the modules' own `reset_parameters()`, run module by module in definition order, so that a random
generator gives each the numbers it would have given an ordinary construction. Only one module's parameters are whole at
any time. A module without `reset_parameters()` may have `_reset_parameters()`, as nn.MultiheadAttention has, which may
set what lies in modules inside it: these are reset first, all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.runtime.units import is_expert
from harness.fsdp.storage.param_group import InitialValue, ParamGroup
from harness.fsdp.storage.parameter_access import SHARDED, slots_of
from harness.fsdp.tensor_parallel import real, values_here
from harness.private_torch import parameters_of


def values_of_first_rank(module: nn.Module, meshes: Meshes) -> InitialValue:
    """Parameter values of the first rank; buffers are overwritten at once. *Collective.*"""
    params = dict(module.named_parameters())
    for name, buffer in module.named_buffers():
        value = meshes.everyone.from_first(buffer, f"initial {name}")
        if not torch.equal(value, buffer.to(value.device)):
            buffer.copy_(value)

    def initial(name: str, shape: torch.Size) -> Tensor:
        everyone = meshes.of(expert=is_expert(params[name])).everyone
        return everyone.from_first(values_here(params[name]), f"initial {name}")

    return initial


def leave_meta(module: nn.Module, device: torch.device, *, has_values: bool, resets: bool) -> None:
    """Put storage-free parameters on the device in place of those on meta. resets: `reset_parameters()` gives values,
    those of buffers too. Raises ValueError: nothing says what their values are to be, or those of buffers."""
    hollow = [(name, param) for name, param in module.named_parameters() if param.is_meta]
    if hollow and (device.type == "meta" or not has_values):
        raise ValueError(
            f"parameter {hollow[0][0]} is on the meta device: give `device`, and `initial_value` or"
            " init_on_meta=True (fully_shard_model: init_model_with_meta_device=True)"
        )
    buffers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if buffers and not resets:
        raise ValueError(
            f"buffer {buffers[0]} is on the meta device, and nothing gives it values (initial_value is asked for"
            " parameters alone): make buffers where they are to stay, register_buffer(name, torch.ones(n,"
            " device='cpu')); or give their module reset_parameters() and use init_on_meta=True (fully_shard_model:"
            " init_model_with_meta_device=True) without initial_value"
        )
    slots = slots_of(module)
    for _, param in hollow:
        nan = torch.full((), float("nan"), dtype=param.dtype, device=device)
        made = real(param, nan.expand(values_here(param).shape))
        made.__dict__.update(param.__dict__)  # marks such as `allreduce`
        for slot in slots[id(param)]:
            slot.put(made, param)
        setattr(param, SHARDED, made)  # for an optimizer that has it


def reset_by_module(module: nn.Module, buckets: Sequence[ParamGroup], meshes: Meshes, device: torch.device) -> None:
    """Reset parameters module by module, unsharded for that moment, and keep this rank's part. *Collective.*

    A parameter of several modules keeps the value of the first. Values are the first rank's; of a TP shard that its
    module reset, those of the first rank with the same shard. Raises ValueError: a module with parameters or buffers
    has neither `reset_parameters` nor `_reset_parameters`.
    """
    homes = {
        id(param): (bucket, slot)
        for bucket in buckets
        for slot, (_, param) in zip(bucket.layout.slots, bucket.params, strict=True)
    }
    names = {id(part): path or "the module" for path, part in module.named_modules()}
    done: set[int] = set()
    for turn in _turns(module, set()):
        parts = [part for part in turn if _has_own(part)]
        resets = [_reset_of(part, names[id(part)]) for part in parts]
        for part in parts:
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.is_meta:
                    setattr(part, name, torch.empty_like(buffer, device=device))
        for key, value in _values_of(parts, resets, lambda key: homes[key][0].key.dtype, device).items():
            bucket, slot = homes[key]
            if key not in done:
                done.add(key)
                tp_shard = bucket.tp_shard_of(slot)
                is_cut = not tp_shard.is_whole and tuple(value.shape) == tp_shard.here
                alike = meshes.dense.everyone if is_cut else meshes.everyone
                bucket.set_value(slot, alike.from_first(value, f"initial {slot.spec.name}"))
            bucket.views.forget_edits()  # a tied one is reset again: of no effect, yet it counts as written to


def _turns(part: nn.Module, seen: set[int]) -> Iterator[list[nn.Module]]:
    """Modules reset together, in the order of an ordinary construction."""
    if id(part) in seen:
        return
    seen.add(id(part))
    inner = (turn for child in part.children() for turn in _turns(child, seen))
    if _has_own(part) and not hasattr(part, "reset_parameters") and hasattr(part, "_reset_parameters"):
        yield [*(each for turn in inner for each in turn), part]
    else:
        yield [part]
        yield from inner


def _has_own(part: nn.Module) -> bool:
    hollow = any(buffer.is_meta for buffer in part.buffers(recurse=False))
    return hollow or any(param is not None for param in parameters_of(part).values())


def _reset_of(part: nn.Module, name: str) -> Callable[[], None]:
    found: Callable[[], None] | None = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
    if found is None:
        raise ValueError(
            f"{name} ({type(part).__name__}) has parameters or buffers of its own and neither reset_parameters() nor"
            " _reset_parameters(); write one, or give `initial_value` and make its buffers on a real device"
        )
    return found


def _values_of(
    parts: Sequence[nn.Module],
    resets: Sequence[Callable[[], None]],
    dtype_of: Callable[[int], torch.dtype],
    device: torch.device,
) -> dict[int, Tensor]:
    """Values that resets give to unsharded plain parameters in modules, by the id of the parameter each stands for.

    Full ones where a DTensor's plan has cut. dtype_of: as the module gave it.
    """
    params_of: list[dict[str, Any]] = [parameters_of(part) for part in parts]
    held = [(params, name, param) for params in params_of for name, param in params.items() if param is not None]
    stand_ins = {
        key: nn.Parameter(torch.empty(param.shape, dtype=dtype_of(key), device=device), param.requires_grad)
        for key, param in {id(param): param for *_, param in held}.items()
    }
    found: dict[int, Tensor] = {}
    for params, name, param in held:
        params[name] = stand_ins[id(param)]
    try:
        for reset in resets:
            reset()
        for params, name, param in held:
            found.setdefault(id(param), values_here(params[name]).data)
    finally:
        for params, name, param in held:
            params[name] = param
    return found
