"""megatron-fsdp's names: its entries with their arguments, and the methods of its model.

Arguments of `optimizer.step` and `optimizer.zero_grad` are in `harness.fsdp.sharding`. A name that has no meaning here
raises, and says what to use in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.build import engine_of
from harness.fsdp.guards import held_by_several
from harness.fsdp.module import FSDPModule
from harness.fsdp.options import OuterStrategy, Strategy, refuse_unknown
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.preconditions import groups_of
from harness.fsdp.runtime.step import StepError, StepState
from harness.fsdp.sharding import bind, engine_for, shard
from harness.fsdp.storage.param_group import InitialValue
from harness.fsdp.update import norms

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)
UNBUILT = {  # arguments of megatron-fsdp that are not built, with the one value that asks for nothing
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "keep_fp8_transpose_cache": False,
    "use_decoupled_grad": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "enable_fine_grained_param_gather": False,
    "cuda_graph_mode": False,
}


def without_unbuilt(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the arguments. NotImplementedError: another one of megatron-fsdp's asks for something.
    TypeError: nobody knows one, with the nearest names."""
    refuse_unknown(arguments, "fully_shard", ("module", *(fully_shard_model.__kwdefaults__ or ()), *UNBUILT))
    for name, nothing in UNBUILT.items():
        if arguments.get(name, nothing) != nothing:
            raise NotImplementedError(f"{name}={arguments[name]!r} is not built; only {name}={nothing!r} is accepted")
    return {name: value for name, value in arguments.items() if name not in UNBUILT}


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
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    sync_model_each_microbatch: bool = True,
    calculate_per_token_loss: bool = False,
    grad_divisor: float | None = None,
    fsdp_double_buffer: bool = False,
    maxpool_double_buffer: bool = False,
    initial_value: InitialValue | None = None,
    **others: Any,
) -> MegatronModel:
    """Shard a module in place over one or two dimensions of a device mesh (or over all ranks), under megatron-fsdp's
    names, and return it. Pass its optimizers to `fully_shard_optimizer`. *Collective.*

    Args:
        device_mesh: the ranks, by axis; None: all ranks of the default group are one inner axis.
        dp_shard_dim, dp_outer_dim: names of the mesh's dimensions over which shards are split (the inner axis), and
            over which they are replicated (HSDP), or optimizer state is split once more (HFSDP); None: no outer axis.
        tp_dim: name of the dimension over which a tensor-parallel plan (`parallelize_module`) has already split
            parameters (see [Note: Under tensor parallelism]); a dimension of one rank has no effect.
        hybrid_fsdp_group: all ranks of both axes (the mesh may have a flattened dimension for them); None: made here.
        expt_device_mesh, hybrid_fsdp_expt_group: the same for parameters with `allreduce = False` (experts).
        fsdp_group_ag, expt_fsdp_group_ag: a separate communicator of the inner ranks for gathers; None: gathers and
            reductions share one.
        fsdp_unit_modules, mixed_precision_policy: `unit_modules` and `mp_policy` of `harness.fsdp.fully_shard`.
        zero_dp_strategy, outer_dp_sharding_strategy: `strategy` and `outer_strategy` there.
        init_model_with_meta_device: `init_on_meta` there.
        device, module: as there.
        grad_divisor, initial_value: as there.
        sync_model_each_microbatch: if a backward outside `no_sync()` and `sync()` ends the step's accumulation.
        calculate_per_token_loss: gradients are summed and not divided.
        fsdp_double_buffer, maxpool_double_buffer: other names of the option `double_buffer`.
        others: options; arguments of megatron-fsdp that are not implemented, with the one value that has no effect.

    Raises:
        NotImplementedError: an argument of megatron-fsdp that is not implemented has another value.
        TypeError: an argument neither engine knows.
        ValueError: a value is wrong.
    """
    options = without_unbuilt(others)
    if fsdp_double_buffer or maxpool_double_buffer:  # other names of the option
        options["double_buffer"] = True
    if calculate_per_token_loss:
        if grad_divisor is not None:
            raise ValueError(f"calculate_per_token_loss=True divides by nothing; drop grad_divisor={grad_divisor}")
        grad_divisor = 1.0
    dims = dp_shard_dim, dp_outer_dim
    experts = expt_device_mesh, *dims, None, hybrid_fsdp_expt_group, expt_fsdp_group_ag
    model: MegatronModel = shard(
        module,
        MegatronModel,
        groups=groups_of(device_mesh, *dims, tp_dim, hybrid_fsdp_group, fsdp_group_ag),
        expert_groups=None if expt_device_mesh is None else groups_of(*experts),
        unit_modules=fsdp_unit_modules,
        strategy=Strategy.parse(zero_dp_strategy, "zero_dp_strategy"),
        outer_strategy=OuterStrategy.parse(outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
        mp_policy=mixed_precision_policy,
        device=device,
        grad_divisor=grad_divisor,
        initial_value=initial_value,
        init_on_meta=init_model_with_meta_device,
        **options,
    )
    engine_of(model).step.sync = sync_model_each_microbatch
    return model


def fully_shard(module: nn.Module, optimizer: Opt, **arguments: Any) -> tuple[MegatronModel, Opt]:
    """Shard a module in place, and its optimizer, for a plain loop; returns both. The optimizer, built over the
    module's parameters, keeps its groups and updates this rank's shards. *Collective.*

    Args:
        arguments: those of `fully_shard_model`, such as `fsdp_unit_modules=[Block]` and `zero_dp_strategy=3`.

    Raises:
        As `fully_shard_model` and `fully_shard_optimizer`.
    """
    model = fully_shard_model(module, **arguments)
    return model, fully_shard_optimizer(model, optimizer)


def fully_shard_optimizer(
    model: Any = None, optimizer: Any = None, preproc_state_dict_for_dcp_ckpt: Any = True, *, steps_unused: bool = False
) -> Any:
    """Make an optimizer over the module's parameters, built before or after sharding, update this rank's shards.
    Returns the same object.

    The parameter groups keep their settings and their parameters; plain rows stand there while the rule runs
    (see [Note: Local step]). A model may have several optimizers, and an optimizer several models; pass each pair here.
    An optimizer that was built after sharding, and never passed, steps DTensors one by one.

    `optimizer.step` takes `sync_grad_before_optimizer_step` and `install_optimized_model_weights`, and
    `optimizer.zero_grad` takes `zero_grad_buffer`: True, or False where the loop calls the model's method itself.

    Args:
        model: may be omitted if the optimizer was built over the parameters of a sharded model; the optimizer then
            comes first, as megatron-fsdp has it.
        preproc_state_dict_for_dcp_ckpt: only True is accepted; state always suits torch's distributed checkpoint.
        steps_unused: update a parameter without a gradient on any rank as if its gradient were zero. Weight decay and
            momentum then change it, as in engines with one gradient buffer. By default it is skipped, as torch's
            optimizers skip a parameter whose `.grad` is None.

    Raises:
        TypeError, ValueError: see `harness.fsdp.update.rules.check_optimizer`.
        ValueError: no model is given, and the parameters belong to no sharded model or to several.
    """
    if isinstance(model, torch.optim.Optimizer):  # megatron-fsdp's order: the optimizer, then its flag
        preproc_state_dict_for_dcp_ckpt = preproc_state_dict_for_dcp_ckpt if optimizer is None else optimizer
        model, optimizer = None, model
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"fully_shard_optimizer takes an optimizer, or a model and an optimizer, not {optimizer!r}")
    without_unbuilt({"preproc_state_dict_for_dcp_ckpt": preproc_state_dict_for_dcp_ckpt})
    bind(engine_for(optimizer) if model is None else engine_of(model), optimizer, steps_unused=steps_unused)
    return optimizer


class MegatronModel(FSDPModule):
    """An `FSDPModule` that also has the methods of megatron-fsdp's `MegatronFSDP`, under their names.

    All ranks call these methods, in the same order.
    """

    is_last_microbatch = property(lambda self: engine_of(self).step.sync, FSDPModule.set_model_auto_sync)
    """True if the next backward ends the step's accumulation; may be set, as `set_model_auto_sync` does."""
    model_auto_sync = is_last_microbatch

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """See `FSDPModule.finish_grad_sync`; `force_all_reduce` is not implemented."""
        if force_all_reduce:
            raise NotImplementedError("force_all_reduce=True: zero_dp_strategy='no_shard', or model.full_gradients()")
        super().finish_grad_sync()

    def start_grad_sync(self, *_: Any) -> None:
        """Nothing: backwards and forwards issue their own collectives, and whoever uses their results waits."""

    synchronize_gradient_reduce = synchronize_param_gather = start_grad_sync

    attach_grad_to_optimizer_state = FSDPModule.finish_grad_sync  # parameters show gradients as `.grad`

    def scale_gradients(self, scaling_factor: float) -> None:
        """Finish the gradients and multiply them by a factor, the same on all ranks; without a backward do nothing."""
        engine = engine_of(self)
        if engine.step.has_gradients:
            engine.gradients.finish()
            norms.scale_gradients(engine.buckets, float(scaling_factor))

    zero_grad_buffer = FSDPModule.zero_grad

    install_optimized_model_weights = FSDPModule.install_weights  # after `step(install_optimized_model_weights=False)`

    def start_param_sync(self, *_: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Nothing: each forward issues its own gathers. `force_sync` is not implemented."""
        if force_sync:
            raise NotImplementedError("force_sync=True: use `with model.unsharded():` to read or edit whole weights")

    def broadcast_params(self) -> None:
        """Set weights that several ranks hold to the first rank's values, including its edits, from the next forward.
        Weights that only one rank holds (its shard under `optim_grads_params`) do not change."""
        engine = engine_of(self)
        engine.weights.refuse_held()
        engine.weights.bring_up_to_date()  # of rows that other ranks keep, the first one has no edits
        engine.weights.before_edit()
        for comm, replicas in held_by_several(engine.buckets, engine.meshes):
            for each in replicas:
                each.tensor.copy_(comm.from_first(each.tensor, f"weights of {each.name}"))
        engine.weights.install()

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Reduce in another policy's `grad_comm_dtype` in the body, which is one step or several. Its other fields must
        be the model's, or all be defaults. Gradients that are not finished when it ends are finished then.

        Raises:
            NotImplementedError: another field differs; or buffers of fixed size were made for the present dtype
                (`double_buffer`, `nccl_ub`).
            StepError: a RuntimeError. There are gradients that are not finished.
            ValueError: the dtypes do not go together.
        """
        engine, before = engine_of(self), engine_of(self).policy
        if engine.options.double_buffer:  # which nccl_ub turns on
            raise NotImplementedError("double_buffer and nccl_ub have buffers of one grad_comm_dtype: leave both off")
        engine.hooks.recover()
        if engine.step.state not in (StepState.IDLE, StepState.FINISHED):
            raise StepError(f"a change of grad_comm_dtype, {engine.step.state.value}: change it after zero_grad()")
        wire = mixed_precision_policy.grad_comm_dtype
        changed = replace(before, grad_comm_dtype=wire)
        if mixed_precision_policy not in (changed, MixedPrecisionPolicy(grad_comm_dtype=wire)):
            raise NotImplementedError(
                f"{mixed_precision_policy} for {before}: of a sharded model only grad_comm_dtype may change"
            )
        engine.set_policy(changed)
        try:
            yield
            if engine.step.has_gradients:
                engine.gradients.finish()
        except BaseException:
            engine.hooks.recover()
            if engine.step.has_gradients:
                engine.step.fail()
            raise
        finally:
            engine.set_policy(before)
