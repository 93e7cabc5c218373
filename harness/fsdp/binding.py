"""How a torch optimizer comes to step flat pieces of a sharded model."""

from __future__ import annotations

from typing import Any

import torch

from harness.fsdp.build import OWNER, Engine
from harness.fsdp.runtime.step import Call
from harness.fsdp.storage.at_rest import sharded_of
from harness.fsdp.storage.parameter_access import HOME
from harness.fsdp.tensor_parallel.declared import successor_of
from harness.fsdp.update.flat_step import FlatStep
from harness.fsdp.update.rules import begins_with_gradient, check_optimizer, create_state_of, kernel_settings

_FLAT_STEP = "_fsdp_flat_step"


def bind(engine: Engine, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
    """Let an optimizer step flat pieces of sharded parameters; see [Note: Flat step]. It may step several models.

    Raises as `harness.fsdp.megatron.fully_shard_optimizer`.
    """
    numerics, decoupled = engine.options.numerics, engine.options.use_decoupled_grad
    check_optimizer(optimizer, engine.buckets, numerics, decoupled=decoupled)
    _take_sharded(optimizer)
    flat: FlatStep | None = getattr(optimizer, _FLAT_STEP, None)
    if flat is None:
        flat = FlatStep(optimizer)
        setattr(optimizer, _FLAT_STEP, flat)
        optimizer.register_state_dict_pre_hook(_have_state)
        optimizer.register_load_state_dict_post_hook(lambda loaded: getattr(loaded, _FLAT_STEP).take_loaded())
    flat.steps_unused |= steps_unused
    flat.decoupled |= decoupled
    if any(each is flat for each in engine.flat_steps):
        return
    engine.flat_steps.append(flat)
    chosen = flat.kernels

    def before(*, sync_grad_before_optimizer_step: bool = True, install_optimized_model_weights: bool = True) -> None:
        engine.weights.refuse_held()
        engine.weights.adopt_edits()
        if not sync_grad_before_optimizer_step:
            engine.step.check(Call.update)
        engine.gradients.finish()
        engine.step.update(installs=install_optimized_model_weights)
        engine.weights.before_update()

    def kernels(own: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
        fusable = all(segment.fusable for bucket in engine.buckets for segment in bucket.layout.segments)
        found = kernel_settings(own, group, numerics, fusable=fusable)
        return {**found, **{name: found.get(name, value) and value for name, value in chosen(own, group).items()}}

    flat.before.append(before)
    flat.kernels = kernels
    zero_grad = optimizer.zero_grad

    def forget(set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        if zero_grad_buffer:
            engine.gradients.forget_unfinished()
        zero_grad(set_to_none)
        if zero_grad_buffer:
            engine.gradients.let_go()

    optimizer.zero_grad = forget  # type: ignore[method-assign] # on the instance: torch has no hook


def _have_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups if not any(optimizer.state.values()) else ():
        if not begins_with_gradient(group):
            create_state_of(optimizer, group)


def _take_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was built before sharding have the sharded parameters, and state of them."""
    for group in optimizer.param_groups:
        sharded = [sharded_of(successor_of(param)) for param in group["params"]]
        for param, made in zip(group["params"], sharded, strict=True):
            if made is not param and param in optimizer.state:
                optimizer.state[made] = optimizer.state.pop(param)
        group["params"] = sharded


def engine_for(optimizer: torch.optim.Optimizer) -> Engine:
    """The engine of the sharded model whose parameters an optimizer has.

    Raises:
        ValueError: it has none of a sharded model, or of several.
        RuntimeError: the model is gone.
    """
    found: dict[int, Engine] = {}
    for param in (sharded_of(successor_of(each)) for group in optimizer.param_groups for each in group["params"]):
        if (reference := getattr(param, OWNER, None)) is None:
            continue
        if (engine := reference()) is None:
            raise RuntimeError(
                f"the sharded model of parameter {getattr(param, HOME, ('?',))[0]} is gone: keep what fully_shard_model"
                " returned, and build the optimizer anew over its parameters"
            )
        found[id(engine)] = engine
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
