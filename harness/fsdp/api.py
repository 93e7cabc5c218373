"""The entry for plain loops (see [Note: Two entries]).

`fully_shard` takes a module and an optimizer, returns both, and from then on `loss.backward(); optimizer.step();
optimizer.zero_grad()` is a sharded step. Argument names follow NVIDIA's megatron-fsdp; what is not built raises
NotImplementedError by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp import optimizer as optim
from harness.fsdp.arguments import group_of, refuse_unbuilt
from harness.fsdp.buffer import InitialValue
from harness.fsdp.communicator import EAGER_LIMIT_BYTES
from harness.fsdp.model import ShardedModel, refuse_state_dict
from harness.fsdp.policy import MixedPrecisionPolicy, Numerics, Strategy


def fully_shard_model(
    module: nn.Module,
    *,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: Strategy | str | int = 3,
    device: torch.device | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    calculate_per_token_loss: bool = False,
    grad_divisor: float | None = None,
    numerics: Numerics | str = Numerics.fast,
    prefetch: int = 1,
    initial_value: InitialValue | None = None,
    report_nan_in_param_grad: bool = False,
    eager_limit_bytes: int | None = EAGER_LIMIT_BYTES,
    watchdog_timeout_s: float | None = None,
    check_collectives: bool = False,
    check_replicas_every: int = 0,
    **unbuilt: Any,
) -> ShardedModel:
    """Shard a module over one dimension of a device mesh (or over all ranks).

    Arguments are those of `ShardedModel` under megatron-fsdp's names. `calculate_per_token_loss` sums gradients without
    dividing them.

    Raises:
        NotImplementedError: an argument of megatron-fsdp that is not built asks for something.
        TypeError: an argument neither engine knows.
        ValueError: a value is wrong.
    """
    refuse_unbuilt(unbuilt)
    if calculate_per_token_loss:
        if grad_divisor is not None:
            raise ValueError(f"calculate_per_token_loss=True divides by nothing; drop grad_divisor={grad_divisor}")
        grad_divisor = 1.0
    return ShardedModel(
        module,
        group=group_of(device_mesh, dp_shard_dim),
        unit_modules=fsdp_unit_modules,
        strategy=zero_dp_strategy,
        mixed_precision_policy=mixed_precision_policy,
        device=device,
        grad_divisor=grad_divisor,
        numerics=numerics,
        prefetch=prefetch,
        initial_value=initial_value,
        report_nan_in_param_grad=report_nan_in_param_grad,
        eager_limit_bytes=eager_limit_bytes,
        watchdog_timeout_s=watchdog_timeout_s,
        check_collectives=check_collectives,
        check_replicas_every=check_replicas_every,
    )


def fully_shard_optimizer(model: ShardedModel, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer built over the module's parameters update this rank's shards; returns the same object.

    Its parameter groups keep their settings and their number. `step` first finishes the gradients and afterwards
    refreshes the compute weights; `zero_grad` forgets the main gradients.

    Raises:
        TypeError, ValueError: see `harness.fsdp.optimizer.ShardedOptimizer`; or the model has an optimizer already.
    """
    if model._sharded_optimizer is not None:
        raise ValueError("the model has an optimizer already; put all parameter groups into one")
    sharded = optim.ShardedOptimizer(optimizer, model.buckets, model._comm, model.numerics)
    model._sharded_optimizer = sharded

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise NotImplementedError("step(closure) is not built; run forward and backward before step()")
        model.finish_grad_sync()
        if model.has_gradients:
            sharded.attach()

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model.install_weights()

    def zero_grad(set_to_none: bool = True) -> None:
        sharded.detach()
        model.zero_grad(set_to_none)

    def add_param_group(group: Any) -> None:
        raise NotImplementedError("parameter groups cannot be added after sharding; give all of them before")

    # Replaced on the instance, which mypy takes for a mistake: torch has hooks for step, none for these two.
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]
    optimizer.register_state_dict_pre_hook(refuse_state_dict)
    optimizer.register_load_state_dict_pre_hook(refuse_state_dict)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: Any
) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """Shard a module and its optimizer for a plain loop; see `fully_shard_model` for the arguments.

    Raises:
        As `fully_shard_model` and `fully_shard_optimizer`.
    """
    model = fully_shard_model(module, **kwargs)
    return model, fully_shard_optimizer(model, optimizer)
