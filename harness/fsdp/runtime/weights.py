"""Weights of a model outside its passes: their first values, updates, and unsharded for the program itself.

[Note: Weights on their way] After an update, a bucket that is kept whole between uses gets the parts that others
updated. On a device each unit waits for its own when it is used for the first time, so that the forward begins beside
the gathers of later units. Until then its parameters stay sharded. On a CPU everything is received as it is installed.

What was edited inside `unsharded()` is told on leaving, by torch's counters and where this rank's own part is no longer
what the main weights give when cast (through numpy, say). If any rank saw an edit, each takes over the elements of its
part that differ, so that others keep the bits that the compute dtype does not have, and all install.

A model too large for one device is built on "meta", without memory. Its values come either from `initial_value`, by
name, or from the modules' own `reset_parameters()`, run module by module in definition order, so that a random
generator gives each the numbers it would have given an ordinary construction. Only one module's parameters are whole at
any time. A module without `reset_parameters()` may have `_reset_parameters()`, as nn.MultiheadAttention has, which may
set what lies in modules inside it: these are reset first, all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards import check_equal, held_by_several
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.units import Unit, buckets_of, is_expert
from harness.fsdp.storage.codec import refresh_scales
from harness.fsdp.storage.param_group import InitialValue, ParamGroup
from harness.fsdp.storage.parameter_access import SHARDED, by_engine, slots_of
from harness.fsdp.tensor_parallel import real, values_here
from harness.private_torch import parameters_of


class Weights:
    """Installs updated main weights as compute weights; unshards units for the program, and takes over its edits.

    Args:
        user_buffers: told after the first step, where registration waits for it.
        check_every: updates between comparisons of weights that several ranks hold; 0: never.
    """

    def __init__(self, hooks: Hooks, meshes: Meshes, user_buffers: UserBuffers, check_every: int) -> None:
        self.hooks, self.units, self.gather, self.step = hooks, hooks.units, hooks.gather, hooks.step
        self.buckets = buckets_of(hooks.units)
        self.meshes, self.runtime = meshes, meshes.dense.everyone.runtime
        self.user_buffers, self.check_every = user_buffers, check_every
        self._in_8_bits = [(each.codec, each.main_shards, each.mesh) for each in self.buckets if each.codec is not None]
        self._on_way: Sequence[ParamGroup] = ()  # whose update nobody has waited for

    def bring_up_to_date(self) -> None:
        """Install main weights written since the last install. *Collective* if any were. Raises as `refuse_edits`."""
        self.refuse_edits()
        if any(bucket.is_stale for bucket in self.buckets):
            self.install()

    @by_engine
    def install(self) -> None:
        """Install main weights as compute weights and reshard. *Collective.*

        RuntimeError: compute weights were edited in place and would be overwritten; or `unsharded()` holds some.
        ReplicaDrift: see `harness.fsdp.guards.check_equal`.
        """
        self.refuse_held()
        self.refuse_edits()
        self.gather.reshard_all()
        self.wait()
        self.step.num_updates += 1
        refresh_scales(self._in_8_bits, self.meshes)
        for bucket in self.buckets:
            bucket.install()
        self._on_way = self.buckets
        compares = self.check_every and self.step.num_updates % self.check_every == 0
        if compares or self.user_buffers.due or not self.runtime.has_streams:
            self.wait()
        if self.user_buffers.due:
            self.user_buffers.register()
        for comm, replicas in held_by_several(self.buckets, self.meshes) if compares else ():
            check_equal(replicas, comm, f"after update {self.step.num_updates}")

    @by_engine
    def wait(self) -> None:
        on_way, self._on_way = self._on_way, ()
        for bucket in on_way:
            bucket.receive()

    def refuse_held(self) -> None:
        if self.gather.held:
            raise RuntimeError(
                "weights cannot be updated or loaded while model.unsharded() or a method such as generate() holds them"
                " whole: call optimizer.step() and load_state_dict() outside"
            )

    @by_engine
    def refuse_edits(self) -> None:
        """RuntimeError where unsharded weights were edited, which main weights do not have."""
        if not self.gather.held:  # `unsharded()` takes edits itself, from all ranks at once
            for bucket in self.buckets:
                bucket.refuse_lost_edits()

    def before_edit(self) -> None:
        """Called before an optimizer, or the program, writes main weights.

        A forward may have run since the backward, and other ranks may still be in it. The device may still copy
        offloaded weights of the step before.
        """
        self.wait()
        self.gather.wait_for_readers()
        if self.buckets[0].plan.offload is not None:
            self.runtime.synchronize()

    @contextmanager
    def unsharded(self, wanted: nn.Module | None = None) -> Iterator[None]:
        units = self._units_of(wanted)
        self.hooks.recover()
        if self.hooks.is_inside:
            raise RuntimeError("unsharded() inside the model's forward or backward: weights that run are whole already")
        self.hooks.check_module()
        self.bring_up_to_date()
        self.wait()
        buckets = buckets_of(units)
        with self.gather.hold(units) as held:
            self.gather.wait_for_peers()  # the program may edit what they read
            for bucket in buckets_of(held):
                bucket.sharded().forget_edits()  # those from before
            for bucket in buckets:
                bucket.use()
                bucket.sharded().count_edits()
            yield
            edited = self._take_edits(buckets)
        if edited:
            self.install()

    def _units_of(self, wanted: nn.Module | None) -> list[Unit]:
        """Raises ValueError where a parameter of it is not the model's."""
        if wanted is None:
            return list(self.units)
        params = {id(param) for param in wanted.parameters()}
        found = [unit for unit in self.units if params & _params_in(unit)]
        if not params <= set().union(*map(_params_in, found)):
            raise ValueError("unsharded() was given a module that is not the sharded model's, or a part of it")
        return found

    def _take_edits(self, buckets: Sequence[ParamGroup]) -> bool:
        """Have each rank take over edits of its own part; true if any rank made some. *Collective.*"""
        differing = [bucket.differing() for bucket in buckets]
        seen = any(bucket.sharded().edited() for bucket in buckets) or any(
            bool(places.any()) for each in differing for places in each
        )
        flag = torch.tensor(int(seen), device=self.runtime.device)
        is_edited = bool(self.meshes.dense.everyone.sum_scalars(flag, "edits of gathered weights"))
        for bucket, places in zip(buckets, differing, strict=True):
            if is_edited:
                bucket.take_over(places)
            bucket.sharded().forget_edits()
        return is_edited


def _params_in(unit: Unit) -> set[int]:
    return {id(param) for bucket in unit.buckets for pair in bucket.sharded().pairs for param in pair[:2]}


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


def leave_meta(
    module: nn.Module, device: torch.device, initial_value: InitialValue | None, *, init_on_meta: bool
) -> None:
    """Put storage-free parameters on the device in place of those on meta. init_on_meta: without `initial_value`,
    `reset_parameters()` gives values, those of buffers too. Raises ValueError: nothing says what their values are to
    be, or those of buffers."""
    hollow = [(name, param) for name, param in module.named_parameters() if param.is_meta]
    if hollow and (device.type == "meta" or (initial_value is None and not init_on_meta)):
        raise ValueError(
            f"parameter {hollow[0][0]} is on the meta device: give `device`, and `initial_value` or"
            " init_on_meta=True (fully_shard_model: init_model_with_meta_device=True)"
        )
    buffers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if buffers and (initial_value is not None or not init_on_meta):
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
    held: list[tuple[dict[str, Any], str, nn.Parameter]] = [
        (slots, name, param)
        for slots in map(parameters_of, parts)
        for name, param in slots.items()
        if param is not None
    ]
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
