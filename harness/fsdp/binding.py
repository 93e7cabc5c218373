"""How a torch optimizer comes to step flat pieces of a sharded model."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from harness.fsdp.components import Components
from harness.fsdp.options import Options
from harness.fsdp.runtime.step import Call
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.parameter_access import HOME
from harness.fsdp.tensor_parallel.declared import successor_of
from harness.fsdp.update.flat_step import FlatStep
from harness.fsdp.update.rules import begins_with_gradient, check_optimizer, create_state_of, kernel_settings
from harness.fsdp.vocabulary import Numerics

_OWNER = "_fsdp_model"
_FLAT_STEP = "_fsdp_flat_step"


class Model(Protocol):
    module: nn.Module
    buckets: list[Bucket]
    numerics: Numerics
    options: Options
    _parts: Components
    _flat_steps: list[FlatStep]

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. *Collective.*"""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""


def own(model: Model) -> None:
    """Let parameters know their model, so that it can be found for an optimizer over them."""
    reference = weakref.ref(model)

    def zero_grad(set_to_none: bool = True) -> None:
        if (found := reference()) is not None:
            found.zero_grad(set_to_none)

    model.module.zero_grad = zero_grad  # type: ignore[method-assign] # on the instance: torch has no hook
    for bucket in model.buckets:
        for param in bucket.views.at_rest:
            setattr(param, _OWNER, reference)


def bind(model: Model, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
    """Let an optimizer step flat pieces of sharded parameters; see [Note: Flat step]. It may step several models.

    Raises as `harness.fsdp.api.fully_shard_optimizer`.
    """
    check_optimizer(optimizer, model.buckets, model.numerics, decoupled=model.options.use_decoupled_grad)
    _take_sharded(optimizer)
    flat: FlatStep | None = getattr(optimizer, _FLAT_STEP, None)
    if flat is None:
        flat = FlatStep(optimizer)
        setattr(optimizer, _FLAT_STEP, flat)
        optimizer.register_state_dict_pre_hook(_have_state)
        optimizer.register_load_state_dict_post_hook(_take_loaded)
    flat.steps_unused |= steps_unused
    flat.decoupled |= model.options.use_decoupled_grad
    if any(each is flat for each in model._flat_steps):
        return
    model._flat_steps.append(flat)
    parts, chosen = model._parts, flat.kernels

    def before(*, sync_grad_before_optimizer_step: bool = True, install_optimized_model_weights: bool = True) -> None:
        parts.weights.refuse_held()
        parts.weights.adopt_edits()
        if not sync_grad_before_optimizer_step:
            parts.step.check(Call.update)
        model.finish_grad_sync()
        parts.step.update(installs=install_optimized_model_weights)
        parts.weights.before_update()

    def kernels(own: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
        fusable = all(segment.fusable for bucket in model.buckets for segment in bucket.layout.segments)
        found = kernel_settings(own, group, model.numerics, fusable=fusable)
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


def _have_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups if not any(optimizer.state.values()) else ():
        if not begins_with_gradient(group):
            create_state_of(optimizer, group)


def _take_loaded(optimizer: torch.optim.Optimizer) -> None:
    flat: FlatStep = getattr(optimizer, _FLAT_STEP)
    flat.take_loaded()


def _take_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was built before sharding have the sharded parameters, and state of them."""
    for group in optimizer.param_groups:
        sharded = [sharded_of(successor_of(param)) for param in group["params"]]
        for param, made in zip(group["params"], sharded, strict=True):
            if made is not param and param in optimizer.state:
                optimizer.state[made] = optimizer.state.pop(param)
        group["params"] = sharded


def model_of(optimizer: torch.optim.Optimizer) -> Model:
    """The sharded model whose parameters an optimizer has.

    Raises:
        ValueError: it has none of a sharded model, or of several.
        RuntimeError: the model is gone.
    """
    found: dict[int, Model] = {}
    for param in (sharded_of(successor_of(each)) for group in optimizer.param_groups for each in group["params"]):
        reference = getattr(param, _OWNER, None)
        if reference is None:
            continue
        model = reference()
        if model is None:
            raise RuntimeError(
                f"the sharded model of parameter {getattr(param, HOME, ('?',))[0]} is gone: keep what fully_shard_model"
                " returned, and build the optimizer anew over its parameters"
            )
        found[id(model)] = model
    if not found:
        raise ValueError(
            f"no parameter of {type(optimizer).__name__} belongs to a sharded model: build it over the parameters of"
            " what fully_shard_model returned, or call fully_shard_optimizer(model, optimizer)"
        )
    if len(found) > 1:
        raise ValueError(
            f"{type(optimizer).__name__} steps parameters of {len(found)} sharded models: call"
            " fully_shard_optimizer(model, optimizer) once with each of them"
        )
    return next(iter(found.values()))
