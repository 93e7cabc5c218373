"""How a torch optimizer comes to step a sharded model: by `fully_shard_optimizer`, or by itself at its first step.

[Note: Bound at the first step] FSDP2's order is to shard a model and then build an optimizer over its parameters. Those
stay the module's own tensors, which it would step without effect. So an optimizer over parameters of a sharded model
that is in nobody's hands when it steps for the first time is taken in then, as `fully_shard_optimizer` would have; and
what that refuses is refused. A hook of torch's, before every `step` of any optimizer, looks for such.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.fsdp.components import Components
from harness.fsdp.options import Options
from harness.fsdp.runtime import at_rest
from harness.fsdp.runtime.step import Call
from harness.fsdp.state import by_parameter
from harness.fsdp.state.named import ShardedState, StateMismatch
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.parameter_access import HOME
from harness.fsdp.tensor_parallel.declared import successor_of
from harness.fsdp.update.accepted import check_sharded
from harness.fsdp.update.flat_step import INSTALL, SYNC, FlatStep
from harness.fsdp.update.kernels import chosen_for
from harness.fsdp.update.flat_pieces import FlatPiece, free, guard
from harness.fsdp.update.optimizer import ShardedOptimizer
from harness.fsdp.vocabulary import Numerics

TORCH_HELPERS = "torch.distributed.checkpoint.state_dict"
_OWNER = "_fsdp_model"
"""Attribute of a sharded parameter: a weak reference to its model."""
_FLAT_STEP = "_fsdp_flat_step"
"""Attribute of an optimizer: its `FlatStep`."""


class Model(Protocol):
    """What an optimizer needs of a sharded model."""

    module: nn.Module
    buckets: list[Bucket]
    numerics: Numerics
    options: Options
    _parts: Components
    _sharded_optimizer: ShardedOptimizer | None
    _flat_steps: list[FlatStep]

    @property
    def has_gradients(self) -> bool:
        """Whether a backward ran since gradients were last forgotten."""

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. *Collective.*"""

    def install_weights(self) -> None:
        """Bring updated main weights into the compute weights. *Collective.*"""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""

    def sharded_state(self) -> ShardedState:
        """Weights and optimizer state by name, over the engine's own memory."""


def own(model: Model) -> None:
    """Let parameters know their model, so that an optimizer over them can be bound at its first step."""
    if not at_rest.ENABLED:
        _watch_steps()
    model.module.zero_grad = _ForgetAll(weakref.ref(model))  # type: ignore[method-assign] # on the instance: torch has no hook
    for bucket in model.buckets:
        sharded = [] if bucket.views.sharded is None else bucket.views.sharded.params
        for param in (*(each for _, each in bucket.params), *sharded):
            setattr(param, _OWNER, weakref.ref(model))


def bind(model: Model, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
    """Let an optimizer step this rank's shards; see `harness.fsdp.api.fully_shard_optimizer`."""
    if any(bucket.views.sharded is not None for bucket in model.buckets):
        _bind_sharded(model, optimizer, steps_unused=steps_unused)
        return
    sharded = model._sharded_optimizer
    if sharded is None:
        decoupled = model.options.use_decoupled_grad
        sharded = ShardedOptimizer(
            optimizer, model.buckets, model.numerics, decoupled=decoupled, steps_unused=steps_unused
        )
        model._sharded_optimizer = sharded
    else:
        sharded.add(optimizer, steps_unused=steps_unused)
    model._parts.gradients.usage.wanted |= sharded.asks_for_unused
    optimizer.register_step_pre_hook(partial(_before, model, sharded))
    optimizer.register_step_post_hook(partial(_after, model, sharded))
    optimizer.zero_grad = partial(_zero_grad, model, sharded, optimizer)  # type: ignore[method-assign] # as above
    optimizer.state = _State(dict, optimizer.state)
    optimizer.state_dict = partial(_state_dict, model, sharded, optimizer)  # type: ignore[method-assign] # as above
    optimizer.load_state_dict = partial(_load_state_dict, model, sharded, optimizer)  # type: ignore[method-assign] # as above
    optimizer.add_param_group = partial(_add_group, model, sharded, optimizer)  # type: ignore[method-assign] # as above
    setattr(optimizer, _ASKED_BY_SCALER, _NoScaler())
    _guard(model, sharded, optimizer)


def _bind_sharded(model: Model, optimizer: torch.optim.Optimizer, *, steps_unused: bool) -> None:
    """Let an optimizer step flat pieces of sharded parameters; see [Note: Flat step]. It may step several models."""
    check_sharded(optimizer, model.buckets, model.numerics, decoupled=model.options.use_decoupled_grad)
    for group in optimizer.param_groups:
        sharded = [at_rest.sharded_of(successor_of(param)) for param in group["params"]]
        for param, made in zip(group["params"], sharded, strict=True):
            if made is not param and param in optimizer.state:
                optimizer.state[made] = optimizer.state.pop(param)
        group["params"] = sharded
    flat: FlatStep | None = getattr(optimizer, _FLAT_STEP, None)
    if flat is None:
        flat = FlatStep(optimizer)
        setattr(optimizer, _FLAT_STEP, flat)
    flat.steps_unused |= steps_unused
    flat.decoupled |= model.options.use_decoupled_grad
    if any(each is flat for each in model._flat_steps):
        return
    model._flat_steps.append(flat)
    parts, chosen = model._parts, flat.kernels

    def before(*, sync_grad_before_optimizer_step: bool = True, install_optimized_model_weights: bool = True) -> None:
        parts.weights.refuse_held()
        if not sync_grad_before_optimizer_step:
            parts.step.check(Call.update)
        model.finish_grad_sync()
        parts.step.update(installs=install_optimized_model_weights)
        parts.weights.before_update()

    def kernels(own: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
        fusable = all(segment.fusable for bucket in model.buckets for segment in bucket.layout.segments)
        found = chosen_for(own, group, model.numerics, fusable=fusable)
        return {**found, **{name: found.get(name, value) and value for name, value in chosen(own, group).items()}}

    flat.before.append(before)
    flat.kernels = kernels
    zero_grad = optimizer.zero_grad

    def forget(set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        if zero_grad_buffer:
            parts.gradients.forget_unfinished()
        zero_grad(set_to_none)
        if zero_grad_buffer:
            parts.gradients.let_go()

    optimizer.zero_grad = forget  # type: ignore[method-assign] # on the instance: torch has no hook


def _guard(model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Between steps nobody uses what the optimizer steps; see [Note: Flat pieces]."""
    seen = weakref.ref(model)

    def has_gradients() -> bool:
        here = seen()
        return here is not None and here.has_gradients

    for weight in sharded.weights_of(optimizer):
        guard(weight, has_gradients)


def _add_group(
    model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> None:
    sharded.add_group(optimizer, group)
    _guard(model, sharded, optimizer)


@_disable_dynamo  # whoever compiles `optimizer.step` compiles the optimizer's own part
def _before(
    model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Finish the gradients and hand them over. A closure runs before that, once, and its loss stands in for it."""
    given = {**dict(zip(("closure",), args[1:], strict=False)), **kwargs}
    syncs, installs = (given.pop(name, True) for name in (SYNC, INSTALL))
    unknown = [name for name, value in given.items() if name != "closure" and value is not None]
    if unknown or len(args) > 2:
        raise NotImplementedError(
            f"step({', '.join(unknown) or '...'}) is not built: step() takes a closure, {SYNC} and {INSTALL}"
        )
    if given.get("closure") is not None:
        given["closure"] = partial(_same, _run(given["closure"]))
    sharded.lost.check(optimizer, model._parts.everyone)
    sharded.lost = sharded.lost.without(optimizer)
    model._parts.weights.refuse_held()
    if not syncs:
        model._parts.step.check(Call.update)
    model.finish_grad_sync()
    model._parts.step.update(installs=installs)
    model._parts.weights.before_update()
    if model.has_gradients or model._parts.gradients.are_zeros:
        sharded.attach(optimizer, zeros_alone=not model.has_gradients)
        for weight in sharded.weights_of(optimizer):
            free(weight)
    else:  # the model has forgotten what the optimizer may still hold
        sharded.detach(optimizer)
    return args[:1], {name: value for name, value in given.items() if value is not None}


@torch.enable_grad()
def _run(closure: Any) -> Any:
    return closure()


def _same(value: Any) -> Any:
    return value


@_disable_dynamo
def _after(model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _guard(model, sharded, optimizer)
    if not model._parts.step.awaits_install:
        model.install_weights()


def _zero_grad(
    model: Model,
    sharded: ShardedOptimizer,
    optimizer: torch.optim.Optimizer,
    set_to_none: bool = True,
    *,
    zero_grad_buffer: bool = True,
) -> None:
    """Take the gradients away from the optimizer, and with `zero_grad_buffer` forget those of the model."""
    if not zero_grad_buffer:
        sharded.detach(optimizer)
        return
    lost = sharded.lost_to(optimizer) if model.has_gradients else sharded.lost.without(optimizer)
    sharded.detach()
    model.zero_grad(set_to_none)
    sharded.lost = lost


def _state_dict(model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """See `harness.fsdp.state.by_parameter`. *Collective.*

    Raises:
        NotImplementedError: ranks hold different experts under one name; or a parameter was never updated, and what the
            optimizer keeps of it before that cannot be told.
    """
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    by_parameter.have_state(optimizer, to_load=False)
    found = by_parameter.state_dict_of(optimizer, sharded, model.sharded_state(), model._parts.everyone)
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        made = after(optimizer, found)
        found = found if made is None else made
    return found


def _load_state_dict(
    model: Model, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Take back what `_state_dict` gave, for any layout; gradients wait for their step, as in torch. *Collective.*

    Raises:
        StateMismatch: it does not fit; nothing was loaded.
    """
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        made = hook(optimizer, state_dict)
        state_dict = state_dict if made is None else made
    had = any(optimizer.state.values())
    by_parameter.have_state(optimizer, to_load=len(state_dict["state"]) > 0)
    held = model.sharded_state()
    try:
        by_parameter.load_state_dict(optimizer, sharded, held, state_dict)
    except StateMismatch:
        if not had:  # zeros are not what every optimizer begins with
            optimizer.state.clear()
        raise
    held.adopt()
    _guard(model, sharded, optimizer)  # of stretches that were cut, see [Note: Stretches]
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


class _State(defaultdict[Any, Any]):
    """State of an optimizer, which torch's helpers cannot name, and which is not kept by the module's parameters."""

    def __missing__(self, key: Any) -> Any:
        _refuse_parameter(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        _refuse_parameter(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's.

        Raises:
            TypeError: a parameter of the module is asked for.
        """
        _refuse_parameter(key)
        return super().get(key, default)

    def __bool__(self) -> bool:
        """Whether there is any: what torch's helpers ask first, to save and to load.

        Raises:
            NotImplementedError: they ask; they look the tensors of the groups up among the module's parameters.
        """
        if sys._getframe(1).f_globals.get("__name__") == TORCH_HELPERS:
            raise NotImplementedError(
                "get_optimizer_state_dict(), set_optimizer_state_dict(), get_state_dict() and set_state_dict() of torch"
                " name state by the parameters in the optimizer's groups, which hold flat tensors of a sharded model:"
                " call optimizer.state_dict() and load_state_dict(), by a parameter's number, or model.sharded_state()"
                " and adopt_state(), by its name; torch.distributed.checkpoint saves and loads either"
            )
        return len(self) > 0


def _refuse_parameter(key: object) -> None:
    if isinstance(key, torch.Tensor) and hasattr(key, HOME):
        name, _ = getattr(key, HOME)
        raise TypeError(
            f"optimizer.state has nothing of parameter {name}: the optimizer of a sharded model keeps state of flat"
            " pieces of this rank's weights. Read it by name from model.sharded_state(), or by number from"
            " optimizer.state_dict(), on all ranks; edit it over optimizer.state.values()"
        )


_ASKED_BY_SCALER = "_step_supports_amp_scaling"
"""What torch.amp.GradScaler looks for on an optimizer before it steps it."""


@dataclass(frozen=True)
class _ForgetAll:
    """`zero_grad` of the module itself: gradients of its parameters are the model's."""

    model: weakref.ref[Any]

    def __call__(self, set_to_none: bool = True) -> None:
        model = self.model()
        if model is not None:
            model.zero_grad(set_to_none)


class _NoScaler:
    """Answers torch.amp.GradScaler, which asks an optimizer for this before it steps it."""

    def __bool__(self) -> NoReturn:
        raise NotImplementedError(
            "torch.amp.GradScaler looks for infinities in each rank's own gradients, so that ranks would part: use"
            " harness.fsdp.LossScale(model) in its place, with scale(loss).backward() and step(optimizer); or, where"
            " nothing is in fp16, GradScaler(enabled=False)"
        )


# -- optimizers in nobody's hands --------------------------------------------------------------------------------------

_WATCHES: list[Any] = []
"""The handle of the hook, once it is there."""


def _watch_steps() -> None:
    if not _WATCHES:
        _WATCHES.append(register_optimizer_step_pre_hook(_bind_at_first_step))


def model_of(optimizer: torch.optim.Optimizer) -> Model:
    """The sharded model whose parameters an optimizer has.

    Raises:
        ValueError: it has none of a sharded model, or of several.
    """
    found = _owners(successor_of(param) for group in optimizer.param_groups for param in group["params"])
    if not found:
        raise ValueError(
            f"no parameter of {type(optimizer).__name__} belongs to a sharded model: build it over the parameters of"
            " what fully_shard_model returned, or call fully_shard_optimizer(model, optimizer)"
        )
    return _only(found, optimizer)


def _only(found: list[Model], optimizer: torch.optim.Optimizer) -> Model:
    if len(found) > 1:
        raise ValueError(
            f"{type(optimizer).__name__} steps parameters of {len(found)} sharded models: build one for each of them"
        )
    return found[0]


@_disable_dynamo
def _bind_at_first_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Take in an optimizer over parameters of a sharded model. Its own hooks run after this one, in the same step."""
    if at_rest.ENABLED:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    found = _owners(successor_of(param) for param in params if type(param) is not FlatPiece)
    if found:
        bind(_only(found, optimizer), optimizer)


def _owners(params: Iterable[Any]) -> list[Model]:
    """The models of parameters that are sharded, each once."""
    found: dict[int, Model] = {}
    for param in params:
        reference = getattr(param, _OWNER, None)
        if reference is None:
            continue
        model = reference()
        if model is None:
            raise RuntimeError(
                "the optimizer steps parameters that are sharded, and their ShardedModel is gone: keep what"
                " fully_shard_model returned, and build the optimizer anew over its parameters"
            )
        found[id(model)] = model
    return list(found.values())
