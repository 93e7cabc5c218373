"""The entry for plain loops (see [Note: Two entries]).

`fully_shard` takes a module and an optimizer, returns both, and from then on `loss.backward(); optimizer.step();
optimizer.zero_grad()` is a sharded step. Argument names follow NVIDIA's megatron-fsdp; what is not built raises
NotImplementedError by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.binding import bind
from harness.fsdp.megatron_arguments import OtherKeywords, ShardKeywords, groups_of, without_unbuilt
from harness.fsdp.model import ShardedModel
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.storage.bucket import InitialValue
from harness.fsdp.vocabulary import OuterStrategy, Strategy

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def fully_shard_model(
    module: nn.Module,
    *,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: Strategy | str | int = 3,
    outer_dp_sharding_strategy: OuterStrategy | str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    sync_model_each_microbatch: bool = True,
    calculate_per_token_loss: bool = False,
    grad_divisor: float | None = None,
    fsdp_double_buffer: bool = False,
    initial_value: InitialValue | None = None,
    **others: Unpack[OtherKeywords],
) -> ShardedModel:
    """Shard a module over one or two dimensions of a device mesh (or over all ranks).

    Arguments are those of `ShardedModel` under megatron-fsdp's names; every option is a keyword too, described in
    `harness.fsdp.options.Options`. `hybrid_fsdp_group`: all ranks of both dimensions, for which `device_mesh` may have
    a flattened one; it is made here if it is None. `calculate_per_token_loss` sums gradients without dividing them.
    `sync_model_each_microbatch` is what `set_model_auto_sync` sets.

    Raises:
        NotImplementedError: an argument of megatron-fsdp that is not built asks for something.
        TypeError: an argument neither engine knows; the message has the nearest names.
        ValueError: a value is wrong.
    """
    options = without_unbuilt(others)
    options["double_buffer"] = fsdp_double_buffer or options.get("double_buffer", False)  # it goes by both names
    if calculate_per_token_loss:
        if grad_divisor is not None:
            raise ValueError(f"calculate_per_token_loss=True divides by nothing; drop grad_divisor={grad_divisor}")
        grad_divisor = 1.0
    groups = groups_of(device_mesh, dp_shard_dim, dp_outer_dim, hybrid_fsdp_group, fsdp_group_ag)
    expert_groups = None
    if expt_device_mesh is not None:
        expert_groups = groups_of(
            expt_device_mesh, dp_shard_dim, dp_outer_dim, hybrid_fsdp_expt_group, expt_fsdp_group_ag
        )
    model = ShardedModel(
        module,
        groups=groups,
        expert_groups=expert_groups,
        unit_modules=fsdp_unit_modules,
        strategy=Strategy.parse(zero_dp_strategy, "zero_dp_strategy"),
        outer_strategy=OuterStrategy.parse(outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
        mixed_precision_policy=mixed_precision_policy,
        device=device,
        grad_divisor=grad_divisor,
        initial_value=initial_value,
        init_on_meta=init_model_with_meta_device,
        **options,
    )
    model.set_model_auto_sync(sync_model_each_microbatch)
    return model


def fully_shard_optimizer(model: ShardedModel, optimizer: Opt, *, steps_unused: bool = False) -> Opt:
    """Let an optimizer built over the module's parameters, before or after sharding, update this rank's shards; returns
    the same object.

    Its parameter groups keep their settings and their number. `step` first finishes the gradients and afterwards
    refreshes the compute weights; `zero_grad` forgets the main gradients. A model may have several optimizers over
    disjoint parameters, each given here. Without this call the first `step` of an optimizer makes it (see [Note: Bound
    at the first step]).

    Args:
        steps_unused: update a parameter that got a gradient on no rank in a step as if it had been zero: decay and
            momentum move it then, as under engines whose gradients are one buffer. Else it is left alone, as one whose
            `.grad` is None is by torch's optimizers.

    Raises:
        TypeError, ValueError: see `harness.fsdp.update.optimizer.ShardedOptimizer`.
    """
    bind(model, optimizer, steps_unused=steps_unused)
    return optimizer


def fully_shard(module: nn.Module, optimizer: Opt, **arguments: Unpack[ShardKeywords]) -> tuple[ShardedModel, Opt]:
    """Shard a module and its optimizer for a plain loop; see `fully_shard_model` for the arguments.

    Raises:
        As `fully_shard_model` and `fully_shard_optimizer`.
    """
    model = fully_shard_model(module, **arguments)
    return model, fully_shard_optimizer(model, optimizer)
