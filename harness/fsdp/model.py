"""A sharded module: its buckets, its two pipelines, and what a step asks of them.

[Note: Two entries] `harness.fsdp.api.fully_shard` is for plain loops. `ShardedModel`, constructed directly, is for
frameworks that own the optimizer's calls: they call `finish_grad_sync`, `clip_grad_norm_`, `install_weights`
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.device import DeviceRuntime, usual_device
from harness.fsdp.comm.fixed_point import beyond_message
from harness.fsdp.comm.gradient_format import Integers
from harness.fsdp.comm.mesh import Groups, Mesh, Meshes
from harness.fsdp.comm.reduction import make_reduction
from harness.fsdp.comm.user_buffers import Member, UserBuffers
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.guards.replicas import ReplicaCheck, held_by_several
from harness.fsdp.guards.watchdog import watch_groups
from harness.fsdp.megatron_arguments import resolve_classes
from harness.fsdp.options import Options
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.bucket_reduction import Reductions
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.hooks import HookDriver
from harness.fsdp.runtime.materialize import build_units, leave_meta, reset_by_module, values_of_first_rank
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Call, Step, StepShape, StepState
from harness.fsdp.runtime.units import Unit, plan_units
from harness.fsdp.state.access import StatefulModel, refuse_state_dict
from harness.fsdp.storage.bucket import Bucket, BucketContext, BucketKey, InitialValue
from harness.fsdp.storage.gradients import GradientPlan
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.update import optimizer as optim
from harness.fsdp.vocabulary import Fallback, OuterStrategy, Strategy

if not hasattr(torch.Tensor, "grad_dtype"):
    raise ImportError(f"harness.fsdp needs torch 2.11 or newer (Tensor.grad_dtype); this is torch {torch.__version__}")

_MARK = "_sharded_by_harness"


class ShardedModel(StatefulModel):
    """A module whose weights, gradients and optimizer state are split over the ranks of one or two axes.

    Args:
        module: sharded in place; on the "meta" device if `initial_value` or `init_on_meta` is given.
        group: process group of the data-parallel ranks; None is the default group. `groups` gives more of them.
        groups: process groups of both axes; see `harness.fsdp.comm.mesh.Groups`.
        expert_groups: the same for parameters with `allreduce = False`, those of experts; None: as the others.
        unit_modules: classes (or dotted paths) whose outermost instances are gathered and reduced together; none makes
            the whole module one unit.
        strategy: ZeRO stage along the inner axis: a `Strategy`, its name, or 0-3.
        outer_strategy: what the outer axis splits: an `OuterStrategy`, its name, or 0-1.
        mixed_precision_policy: dtypes of main weights, main gradients, wire and sum.
        device: where buckets live; None is the device of the parameters, or of meta ones the group's.
        grad_divisor: what the summed gradients are divided by, once a step; of experts too. None is the number of ranks
            (of both axes, experts or not), so that a loss averaged on each rank gives the averaged gradient; a loop
            over k microbatches then scales its loss by 1/k. Given the number of global microbatches (or tokens), no
            loss is ever scaled.
        initial_value: gives each parameter's full value by name, the same on all ranks; None takes what parameters and
            buffers hold on the group's first rank, as DDP does.
        init_on_meta: parameters on the meta device get their values from `reset_parameters()` of each module.
        chosen: fields of `harness.fsdp.options.Options`.

    Raises:
        TypeError: an unknown option.
        ValueError: an argument's value, with what would be valid.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        groups: Groups | None = None,
        expert_groups: Groups | None = None,
        unit_modules: Sequence[type[nn.Module] | str] | None = None,
        strategy: Strategy | str | int = Strategy.optim_grads_params,
        outer_strategy: OuterStrategy | str | int = OuterStrategy.no_shard,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        device: torch.device | None = None,
        grad_divisor: float | None = None,
        initial_value: InitialValue | None = None,
        init_on_meta: bool = False,
        **chosen: Any,
    ) -> None:
        super().__init__()
        self.options = Options.of(chosen)
        if grad_divisor is not None and not grad_divisor > 0:
            raise ValueError(f"grad_divisor={grad_divisor} must be positive")
        if module.__dict__.get(_MARK, False):
            raise ValueError(f"{type(module).__name__} is sharded already; shard a module once")
        self.module = module
        self.strategy = Strategy.parse(strategy, "strategy")
        self.outer_strategy = OuterStrategy.parse(outer_strategy, "outer_strategy")
        self.options.check_against(self.strategy)
        self.numerics = self.options.numerics
        self.policy = mixed_precision_policy or MixedPrecisionPolicy()
        device = device or usual_device(next(module.parameters()).device, groups.inner if groups else group)
        leave_meta(module, device, has_values=initial_value is not None or init_on_meta)
        self._runtime = DeviceRuntime(device)
        self._meshes = self._make_meshes(groups or Groups(group), expert_groups)
        self._everyone = self._meshes.dense.everyone
        self._user_buffers = UserBuffers(
            self.options.nccl_ub,
            [Member(name, comm.group, device) for name, comm in self._meshes.moving.items() if comm.size > 1],
            self._runtime,
            symmetric=not self.options.disable_symmetric_registration,
            may_fall_back=self.options.registration_fallback is Fallback.record,
        )
        self._memory = BucketMemory(device, fixed=self.options.double_buffer, allocating=self._user_buffers.allocating)
        self.grad_divisor = float(grad_divisor if grad_divisor is not None else self._everyone.size)
        self._fixed = self.options.exactly
        self._integers = Integers(self._fixed, self.grad_divisor, device) if self._fixed is not None else None
        self._units = self._build_units(resolve_classes(unit_modules or ()), initial_value, init_on_meta=init_on_meta)
        self.buckets: list[Bucket] = [bucket for unit in self._units for bucket in unit.buckets]
        self._trainable = {bucket.name: bucket for bucket in self.buckets if bucket.trainable}
        self._gather = GatherPipeline(
            self._units, self._runtime, self.options.prefetch, self.options.prefetch_limit_bytes
        )
        watches = self.options.report_nan_in_param_grad
        self._guard = GradientGuard(list(self._trainable.values()), self._everyone) if watches else None
        self._step = Step(self._step_shape())
        self._reduce = ReducePipeline(
            self._units,
            {name: self._reductions_of(bucket) for name, bucket in self._trainable.items()},
            self._meshes,
            self._runtime,
            self._memory,
            self._step,
            factor=1.0 / self.grad_divisor,
            guard=self._guard,
            before_wait=self._gather.pass_turn,
        )
        self._driver = HookDriver(self._units, self._gather, self._reduce, self._step, self._guard)
        self._watchdog = watch_groups(
            [self._everyone.group, *(comm.group for mesh in self._meshes for comm in mesh.communicators)],
            self._runtime,
            self.options.watchdog_timeout_s,
            self.options.check_collectives,
            self._driver.where,
        )
        self._drift = ReplicaCheck(
            lambda: held_by_several(self.buckets, self._meshes), self.options.check_replicas_every
        )
        self._installing: list[Pending] = []
        self._sharded_optimizer: optim.ShardedOptimizer | None = None
        self._user_buffers.model_built()
        module.__dict__[_MARK] = True
        for each in module.modules():
            each.register_state_dict_pre_hook(refuse_state_dict)
            each.register_load_state_dict_pre_hook(refuse_state_dict)

    def _make_meshes(self, groups: Groups, expert_groups: Groups | None) -> Meshes:
        limit, separate = self.options.eager_limit_bytes, self.options.separate_gather_group
        dense = Mesh(groups, self._runtime, limit, separate)
        experts = dense if expert_groups is None else Mesh(expert_groups, self._runtime, limit, separate)
        return Meshes(dense, experts)

    def _build_units(
        self, classes: Sequence[type[nn.Module]], initial_value: InitialValue | None, *, init_on_meta: bool
    ) -> list[Unit]:
        gradients = GradientPlan(
            self.strategy,
            self._memory,
            self.options.grad_buffer,
            self.options.accumulate_unsharded,
            self._fixed is not None,
            torch.device("cpu") if self.options.offload_optimizer else None,
        )

        def context(key: BucketKey) -> BucketContext:
            return BucketContext(gradients, self._meshes.of(expert=key.expert), self.outer_strategy)

        if initial_value is None and not init_on_meta:
            initial_value = values_of_first_rank(self.module, self._meshes)
        plans = plan_units(self.module, classes, self.options.unit_min_elements)
        units = build_units(plans, context, self._memory, self.policy, initial_value)
        if initial_value is None:
            buckets = [bucket for unit in units for bucket in unit.buckets]
            reset_by_module(self.module, buckets, self._meshes.dense, self._memory.device)
        return units

    def _reductions_of(self, bucket: Bucket) -> Reductions:
        mesh = bucket.context.mesh
        dtypes = bucket.dtypes if self._fixed is None else bucket.dtypes.as_integers()
        apart = mesh.has_outer
        inner = make_reduction(mesh.inner, dtypes, self.numerics, self._integers, legs_apart=apart)
        if mesh.outer is None or not apart:
            return Reductions(inner)
        return Reductions(inner, make_reduction(mesh.outer, dtypes, self.numerics, self._integers))

    def _step_shape(self) -> StepShape:
        splits, unsharded = self.strategy.shards_grads, self.options.accumulate_unsharded
        reduces_once = not splits or any(mesh.has_outer for mesh in self._meshes)
        return StepShape(
            reduces_each=(splits and not unsharded) or self._fixed is not None,
            reduces_once=reduces_once,
            accumulates=reduces_once or unsharded,
            exact_terms=self._fixed.terms if self._fixed is not None else None,
            num_ranks=self._everyone.size,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModel:
        raise NotImplementedError("a sharded model cannot be cast or moved; give it its dtype and device before")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    # -- microbatches --------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate; the first one outside ends the step's accumulation.

        `no_shard` and `optim` then communicate once a step; `optim_grads` and above reduce every microbatch over the
        inner axis all the same, unless they accumulate unsharded, and over the outer axis once a step.
        """
        with self._syncing(False):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Backwards inside end the step's accumulation, whatever `set_model_auto_sync` said."""
        with self._syncing(True):
            yield

    @contextmanager
    def _syncing(self, value: bool) -> Iterator[None]:
        before, self._step.sync = self._step.sync, value
        try:
            yield
        finally:
            self._step.sync = before

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Whether a backward outside `no_sync` and `sync` ends the step's accumulation."""
        self._step.sync = sync_model

    # -- a step --------------------------------------------------------------------------------------------------

    def finish_grad_sync(self) -> None:
        """Wait for the step's reductions and scale the gradients, once. Further calls do nothing. *Collective.*

        Raises:
            RuntimeError: the step's last backward ran inside no_sync(), so gradients were never reduced.
            FloatingPointError: with `report_nan_in_param_grad`, a gradient of any rank is not finite.
        """
        self._wait_until_installed()
        self._driver.recover()
        self._step.check(Call.finish_grad_sync)
        if self._step.state is StepState.FINISHED:
            return
        if self._step.state is StepState.IDLE:
            for unit in self._units:
                for gradients in unit.gradients:
                    gradients.settle_sums()
            return
        self._drain()
        if self._guard is not None:
            self._guard.report()
        self._check_exact()
        self._reduce.finish()
        self._step.finished()

    def _check_exact(self) -> None:
        """Raise OverflowError on all ranks if a gradient of any of them could not be written as an integer."""
        if self._integers is None or self._fixed is None:
            return
        count = int(self._everyone.sum_scalars(self._integers.beyond.clone(), "gradients beyond the fixed point"))
        if count:
            raise OverflowError(beyond_message(count, self._fixed))

    def _drain(self) -> None:
        try:
            self._reduce.drain()
        except BaseException:
            self._step.fail()
            raise

    @property
    def has_gradients(self) -> bool:
        """Whether a backward ran since gradients were last forgotten; without one, a step changes nothing."""
        return self._step.has_gradients

    def grad_norm(self) -> float:
        """Euclidean norm of the step's gradient over all ranks, each parameter counted once. *Collective.*"""
        self.finish_grad_sync()
        return optim.gradient_norm(self.buckets, self._everyone, self.numerics)

    def weight_norm(self) -> float:
        """Euclidean norm of all main weights over all ranks, each parameter counted once. *Collective.*"""
        return optim.weight_norm(self.buckets, self._everyone, self.numerics)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients down to `max_norm` where their norm exceeds it; returns the norm before. *Collective.*"""
        norm = self.grad_norm()
        optim.clip_gradients(self.buckets, norm, float(max_norm))
        return norm

    def install_weights(self) -> None:
        """Bring updated main weights into the compute weights; what was gathered before is dropped. *Collective.*

        Raises:
            RuntimeError: compute weights were edited in place, which the main weights would overwrite.
        """
        for bucket in self.buckets:
            bucket.check_unedited()
        self._gather.reshard_all()
        self._wait_until_installed()
        self._step.weights_installed()
        self._installing = optim.install_weights(self.buckets)
        if self._user_buffers.due:
            self._wait_until_installed()
            self._user_buffers.step_done()
        self._drift.after_step()

    def _wait_until_installed(self) -> None:
        """Wait until the other ranks have taken this rank's weights too, so that they may change."""
        with events.waiting():
            for each in self._installing:
                each.wait()
        self._installing = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, main and local. `set_to_none` makes no difference: storage is flat and stays."""
        self._driver.recover()
        self._step.check(Call.zero_grad)
        self._reduce.discard()
        for unit in self._units:
            for gradients in unit.gradients:
                gradients.forget()
        self._step.zero_grad()
        if self._integers is not None:
            self._integers.beyond.zero_()
        if self._guard is not None:
            self._guard.forget()

    # -- what is kept ----------------------------------------------------------------------------------------------

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps, by role: weights (compute, main), main_grads, optimizer, padding, buffers; and
        gradient_sums, where integers or another device keep these apart from the main gradients.

        Between steps, from `zero_grad` to the next reduction, shards of main_grads are not there.
        """
        total = {"compute_weights": 0, "main_weights": 0, "main_grads": 0, "padding": 0, "optimizer": 0}
        for bucket in self.buckets:
            for role, num_bytes in bucket.persistent_bytes().items():
                total[role] = total.get(role, 0) + num_bytes
        if self._sharded_optimizer is not None:
            used, padding = self._sharded_optimizer.state_bytes()
            total["optimizer"] += used
            total["padding"] += padding
        total["buffers"] = sum(buffer.nbytes for buffer in self.module.buffers())
        return total

    def transport(self) -> dict[str, str]:
        """How data moves between ranks here, with the reason where the faster way was asked for and not found."""
        dense = self._meshes.dense
        outer = {f"outer_{key}": value for key, value in dense.outer.transport().items()} if dense.outer else {}
        return dense.inner.transport() | outer

    def user_buffers(self) -> dict[str, str]:
        """NCCL user buffers: requested, effective, and the reason where these differ."""
        return self._user_buffers.facts()

    def counters(self) -> dict[str, int]:
        """What this rank counted since the model was built or `reset_counters` was called, by name:

        transient_peak_bytes: most bytes of temporary buckets (gathered weights, unreduced gradients) alive at once.
        gathered_units_peak: most units, the root apart, whose gathered weights took memory at once.
        peer_read_bytes: bytes read straight from other ranks' memory; 0 where ranks exchange messages instead.
        """
        return {
            "transient_peak_bytes": self._memory.peak_bytes,
            "gathered_units_peak": self._gather.num_alive_peak,
            "peer_read_bytes": sum(memory.bytes_read for memory in self._meshes.peer_memories),
        }

    def reset_counters(self) -> None:
        """Begin `counters` anew: peaks from what is alive now, totals from 0."""
        self._memory.reset_peak()
        self._gather.reset_peak()
        for memory in self._meshes.peer_memories:
            memory.bytes_read = 0

    def close(self) -> None:
        """Take hooks off and end threads. The module keeps whatever weights it holds."""
        self._watchdog.close()
        self._reduce.drain()
        self._wait_until_installed()
        self._driver.remove()
        self._reduce.close()
        self._user_buffers.close()
        for mesh in self._meshes:
            mesh.close()
