"""The entry point for plain loops (see [Note: Two entries]).

`fully_shard` takes a module and an optimizer and returns both. After that, `loss.backward(); optimizer.step();
optimizer.zero_grad()` is a sharded step. Arguments have the names of NVIDIA's megatron-fsdp. An argument that is not
implemented raises NotImplementedError, which names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.binding import bind, model_of
from harness.fsdp.megatron import MegatronModel
from harness.fsdp.megatron_arguments import (
    OtherKeywords,
    ShardKeywords,
    groups_of,
    tensor_axis,
    without_unbuilt,
)
from harness.fsdp.model import ShardedModel
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.storage.bucket_context import InitialValue
from harness.fsdp.vocabulary import OuterStrategy, Strategy

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def fully_shard_model(
    module: nn.Module,
    *,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
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
    maxpool_double_buffer: bool = False,
    initial_value: InitialValue | None = None,
    **others: Unpack[OtherKeywords],
) -> MegatronModel:
    """Shard a module over one or two dimensions of a device mesh (or over all ranks), under megatron-fsdp's names.

    Args:
        module: sharded in place; between passes its parameters are DTensors. On the "meta" device only with
            `initial_value` or `init_model_with_meta_device`.
        device_mesh: the ranks, by axis; None: all ranks of the default group are one inner axis.
        dp_shard_dim: name of the mesh's dimension over which shards are split, the inner axis.
        dp_outer_dim: name of the dimension over which shards are replicated (HSDP), or optimizer state is split once
            more (HFSDP); None: no outer axis.
        tp_dim: name of the dimension over which a tensor-parallel plan (`parallelize_module`) has already split
            parameters (see [Note: Under tensor parallelism]); a dimension of one rank has no effect.
        hybrid_fsdp_group: all ranks of both axes (the mesh may have a flattened dimension for them); None: made here.
        expt_device_mesh: ranks of parameters with `allreduce = False` (experts); None: the same as for the others.
        hybrid_fsdp_expt_group: all ranks of both axes of experts.
        fsdp_group_ag: a separate communicator of the inner ranks for gathers; None: gathers and reductions share one.
        expt_fsdp_group_ag: the same for experts.
        fsdp_unit_modules: classes, or dotted paths of them, whose outermost instances are gathered, reduced and
            released together, such as transformer blocks; None: the whole module is one unit.
        zero_dp_strategy: what the inner axis splits: 0 `no_shard`, 1 `optim`, 2 `optim_grads`, 3 `optim_grads_params`.
        outer_dp_sharding_strategy: what the outer axis splits: 0 `no_shard`, 1 `optim`.
        device: device of the buckets; None: that of the parameters, or the group's if they are on meta.
        init_model_with_meta_device: parameters on the meta device get values from each module's `reset_parameters()`.
        mixed_precision_policy: dtypes of main weights, main gradients, gradients in collectives, and sums; None:
            `MixedPrecisionPolicy()`, which keeps main weights in fp32.
        sync_model_each_microbatch: whether a backward outside `no_sync()` and `sync()` ends the step's accumulation.
        calculate_per_token_loss: gradients are summed and not divided.
        grad_divisor: what summed gradients are divided by, once a step; None: the number of data-parallel ranks, so
            that a loop over k microbatches scales its loss by 1/k.
        fsdp_double_buffer, maxpool_double_buffer: other names of the option `double_buffer`.
        initial_value: returns each parameter's full value by its name, the same on all ranks; None: the values of the
            first rank, as with DDP.
        others: options by name, described in `harness.fsdp.options.Options` and docs/engine_knobs.md. Arguments of
            megatron-fsdp that are not implemented are accepted with the one value that has no effect.

    Returns:
        The model, which the loop calls instead of the module. Pass its optimizers to `fully_shard_optimizer`.

    Raises:
        NotImplementedError: an argument of megatron-fsdp that is not implemented has another value.
        TypeError: an argument neither engine knows; the message has the nearest names.
        ValueError: a value is wrong.
    """
    options = without_unbuilt(others)
    double_buffer = fsdp_double_buffer or maxpool_double_buffer  # it goes by three names
    options["double_buffer"] = double_buffer or options.get("double_buffer", False)
    if calculate_per_token_loss:
        if grad_divisor is not None:
            raise ValueError(f"calculate_per_token_loss=True divides by nothing; drop grad_divisor={grad_divisor}")
        grad_divisor = 1.0
    groups = replace(
        groups_of(device_mesh, dp_shard_dim, dp_outer_dim, hybrid_fsdp_group, fsdp_group_ag),
        tensor=tensor_axis(device_mesh, tp_dim),
    )
    expert_groups = None
    if expt_device_mesh is not None:
        expert_groups = groups_of(
            expt_device_mesh, dp_shard_dim, dp_outer_dim, hybrid_fsdp_expt_group, expt_fsdp_group_ag
        )
    model = MegatronModel(
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


@overload
def fully_shard_optimizer(model: ShardedModel, optimizer: Opt, *, steps_unused: bool = False) -> Opt:
    """An optimizer of this model, built before or after sharding."""


@overload
def fully_shard_optimizer(
    optimizer: Opt, preproc_state_dict_for_dcp_ckpt: Literal[True] = True, *, steps_unused: bool = False
) -> Opt:
    """An optimizer over the parameters of a sharded model, as megatron-fsdp is given it."""


def fully_shard_optimizer(*given: Any, steps_unused: bool = False, **named: Any) -> Any:
    """Make an optimizer over the module's parameters, built before or after sharding, update this rank's shards.
    Returns the same object.

    The parameter groups keep their settings and their parameters; flat pieces of these stand there while the rule runs
    (see [Note: Flat step]). A model may have several optimizers, and an optimizer several models; pass each pair here.
    An optimizer that was built after sharding, and never passed, steps DTensors one by one.

    `optimizer.step` takes `sync_grad_before_optimizer_step` and `install_optimized_model_weights`, and
    `optimizer.zero_grad` takes `zero_grad_buffer`: True, or False where the loop calls the model's method itself.

    Args:
        model: may be omitted if the optimizer was built over the parameters of a sharded model.
        preproc_state_dict_for_dcp_ckpt: only True is accepted; state always suits torch's distributed checkpoint.
        steps_unused: update a parameter without a gradient on any rank as if its gradient were zero. Weight decay and
            momentum then change it, as in engines with one gradient buffer. By default it is skipped, as torch's
            optimizers skip a parameter whose `.grad` is None.

    Raises:
        TypeError, ValueError: see `harness.fsdp.update.rules.check_optimizer`.
        ValueError: no model is given, and the parameters belong to no sharded model or to several.
    """
    model, optimizer = _model_and_optimizer(*given, **named)
    bind(model_of(optimizer) if model is None else model, optimizer, steps_unused=steps_unused)
    return optimizer


def _model_and_optimizer(*given: Any, **named: Any) -> tuple[ShardedModel | None, torch.optim.Optimizer]:
    """The arguments of `fully_shard_optimizer`, in either order of calling it."""
    read = _with_model if "model" in named or (given and isinstance(given[0], nn.Module)) else _without_model
    return read(*given, **named)


def _with_model(
    model: ShardedModel, optimizer: torch.optim.Optimizer
) -> tuple[ShardedModel | None, torch.optim.Optimizer]:
    return model, optimizer


def _without_model(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> tuple[ShardedModel | None, torch.optim.Optimizer]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"fully_shard_optimizer takes an optimizer, or a model and an optimizer, not {optimizer!r}")
    without_unbuilt({"preproc_state_dict_for_dcp_ckpt": preproc_state_dict_for_dcp_ckpt})  # type: ignore[typeddict-item] # refused if it is not True
    return None, optimizer


def fully_shard(module: nn.Module, optimizer: Opt, **arguments: Unpack[ShardKeywords]) -> tuple[MegatronModel, Opt]:
    """Shard a module and its optimizer for a plain loop.

    Args:
        module: sharded in place, over all ranks unless a mesh is given.
        optimizer: built over the module's parameters; it keeps its groups and updates this rank's shards.
        arguments: those of `fully_shard_model`, such as `fsdp_unit_modules=[Block]` and `zero_dp_strategy=3`.

    Returns:
        The model, which the loop calls instead of the module and whose `no_sync()` and `clip_grad_norm_()` it uses; and
        the same optimizer.

    Raises:
        As `fully_shard_model` and `fully_shard_optimizer`.
    """
    model = fully_shard_model(module, **arguments)
    return model, fully_shard_optimizer(model, optimizer)
