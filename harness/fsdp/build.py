"""The parts of one sharded model, and how they are built and wired to each other.

The order is the same on all ranks, and part of the contract between them: groups are made, values are broadcast and
buffers are registered in it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.mesh import Groups, Mesh, Meshes
from harness.fsdp.comm.reduction import FixedPoint, Integers
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards import GradientGuard, check_agreed, check_copies, check_plan, end_watch, watch_groups
from harness.fsdp.options import Numerics, Options, OuterStrategy, Strategy
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.runtime.hooks import Hooks, abandon
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.units import Members, Unit, WeakHook, buckets_of, build_units, is_expert, plan_units
from harness.fsdp.runtime.weights import Weights, leave_meta, reset_by_module, values_of_first_rank
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.codec import mark_weights
from harness.fsdp.storage.dtensors import DTensorFactory
from harness.fsdp.storage.gradients import GradientPlan
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import GroupKey, InitialValue, ParamGroup
from harness.fsdp.storage.parameter_access import Whereabouts, check_names, slots_of
from harness.fsdp.storage.placement import Placements
from harness.fsdp.tensor_parallel import axis_of
from harness.fsdp.update.steps import LocalStep
from harness.private_torch import tree_map

ENGINE = "_fsdp"  # key of a sharded module's `__dict__`: its engine
OWNER = "_fsdp_engine"  # attribute of a sharded parameter: a weak reference to its engine, for an optimizer over it


@dataclass(frozen=True)
class BuildContext:
    """Arguments of a sharding, each valid by itself; `harness.fsdp.api.fully_shard` describes them."""

    groups: Groups
    expert_groups: Groups | None
    unit_classes: list[type[nn.Module]]
    strategy: Strategy
    outer_strategy: OuterStrategy
    policy: MixedPrecisionPolicy
    options: Options
    device: torch.device
    grad_divisor: float | None = None
    initial_value: InitialValue | None = None
    init_on_meta: bool = False

    def placements(self, *, has_outer: bool) -> Placements:
        return Placements.of(self.strategy, self.outer_strategy if has_outer else None)


class Engine:
    """The parts of one sharded model. It has weak references alone to the module, which keeps it. *Collective.*
    ValueError: parameters have no values, groups do not form a grid, or a value does not fit the model. RuntimeError:
    user buffers could not be registered, and nothing else was allowed."""

    def __init__(self, module: nn.Module, context: BuildContext) -> None:
        self.policy, self.options = context.policy, context.options
        self.local_steps, self.forward_methods = list[LocalStep](), list[str]()
        self.tensor_group = context.groups.tensor or axis_of(module.parameters())
        check_plan(module, context.groups, self.tensor_group)
        mark_weights(module)
        leave_meta(module, context.device, context.initial_value, init_on_meta=context.init_on_meta)
        self._make_ranks_and_memory(context)
        self.units = self._units(module, context)
        self.context = replace(context, initial_value=None, init_on_meta=False)
        self.buckets = buckets_of(self.units)  # in model order
        self._wire(module)
        self.user_buffers.model_built()
        self._shard_parameters(module)
        self.runtime.keep_pages()
        parts = self.reduce, self.gather, self.weights.wait, partial(end_watch, self.watchdog)
        weakref.finalize(self, abandon, self.runtime, *parts).atexit = False

    def _make_ranks_and_memory(self, context: BuildContext) -> None:
        options, device = context.options, context.device
        self.runtime = runtime = DeviceRuntime(device)
        transport, separate, experts = options.transport, options.separate_gather_group, context.expert_groups
        dense = Mesh(context.groups, runtime, transport, separate)
        of_experts = dense if experts is None else Mesh(experts, runtime, transport, separate)
        tensor = None if self.tensor_group is None else Communicator(self.tensor_group, runtime, transport)
        self.meshes = Meshes(dense, of_experts, tensor)
        self.user_buffers = UserBuffers(
            options.nccl_ub,
            {name: comm for name, comm in self.meshes.moving.items() if comm.size > 1},
            runtime,
            symmetric=not options.disable_symmetric_registration,
        )
        registers = self.user_buffers.active
        self.memory = BucketMemory(
            device,
            fixed=options.double_buffer,
            moved=self.user_buffers if registers else dense.inner.shm,
            allocating=self.user_buffers.allocating if registers else None,
            registers=registers,
        )
        # a step's summed gradients are divided by it
        self.divisor = float(dense.everyone.size if context.grad_divisor is None else context.grad_divisor)
        self.integers: Integers | None = None  # how gradients are sent under numerics=exact
        if options.numerics is Numerics.exact:
            self.integers = Integers(FixedPoint(options.exact_bits, options.exact_terms), self.divisor, device)

    def _units(self, module: nn.Module, context: BuildContext) -> list[Unit]:
        options, meshes, initial = context.options, self.meshes, context.initial_value
        offload = torch.device("cpu") if options.offload_optimizer else None
        gradients = GradientPlan(self.memory, options.grad_buffer, options.numerics, self.integers, offload)
        _check_same_request(module, context, meshes)
        if initial is None and not context.init_on_meta:
            check_copies(module, meshes.tensor)
            initial = values_of_first_rank(module, meshes)

        def make_group(name: str, key: GroupKey, members: Members) -> ParamGroup:
            mesh, dtypes = meshes.of(expert=key.expert), key.resolve(context.policy)
            placements = context.placements(has_outer=mesh.has_outer)
            return ParamGroup(name, key, members, dtypes, gradients, mesh, placements, meshes.tensor, initial)

        plans = plan_units(module, context.unit_classes, context.policy.param_dtype)
        units = build_units(plans, make_group, self.memory)
        if initial is None:
            reset_by_module(module, buckets_of(units), meshes, context.device)
        return units

    def _wire(self, module: nn.Module) -> None:
        options, meshes, runtime, units = self.options, self.meshes, self.runtime, self.units
        placed = [self.context.placements(has_outer=mesh.has_outer) for mesh in meshes]
        self.step = step = Step(
            reduces_each=self.integers is not None or not any(each.accumulates_locally for each in placed),
            reduces_once=any(each.reduces_once for each in placed),
            exact_terms=None if self.integers is None else self.integers.fixed.terms,
            num_ranks=meshes.dense.everyone.size,
        )
        self.gather = gather = GatherPipeline(units, options.prefetch)
        self.reduce = ReducePipeline(
            units,
            runtime,
            self.memory,
            step,
            factor=1.0 / self.divisor,
            guard=GradientGuard(meshes.everyone) if options.report_nan_in_param_grad else None,
            before_wait=gather.pass_turn,
        )
        self.hooks = hooks = Hooks(units, gather, self.reduce)
        if self.policy.param_dtype is not None:
            hook = partial(_cast_inputs, self.policy.param_dtype)
            hooks.handles += [unit.module.register_forward_pre_hook(hook, with_kwargs=True) for unit in units]
        # keeps nothing alive
        where = weakref.WeakMethod(hooks.where)
        self.watchdog = watch_groups(
            meshes.communicators,
            options,
            lambda: "after its model was deleted" if (found := where()) is None else found(),
        )
        self.weights = weights = Weights(hooks, meshes, self.user_buffers, options.check_replicas_every)
        self.gradients = GradientSync(hooks, weights, self.integers)

    def _shard_parameters(self, module: nn.Module) -> None:
        shards, slots = DTensorFactory(self.buckets), slots_of(module)
        weights = weakref.ref(self.weights)

        def before_write() -> None:
            if (kept := weights()) is not None:  # else the model is gone, and nobody reads its weights
                kept.before_edit()

        for bucket in self.buckets:
            sharded = ShardedParameters(bucket, shards, slots, before_write)
            sharded.sync, bucket.sharded = weakref.ref(self.gradients), weakref.ref(sharded)
            self.gradients.sharded.append(sharded)
            bucket.show(unsharded=False)
            for param in sharded.params:
                setattr(param, OWNER, weakref.ref(self))
        self.hooks.whereabouts = Whereabouts(module)
        self.hooks.before_forward = WeakHook(self.weights.bring_up_to_date)

    @property
    def module(self) -> Any:
        """The sharded module, which outlives its engine."""
        return self.units[0].module

    @property
    def is_closed(self) -> bool:
        return not self.hooks.handles

    def set_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Send gradients from now on as a policy says. No reduction may be in flight. *Collective.* Raises ValueError:
        the policy does not fit the model; nothing has changed."""
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        dtypes = [replace(policy.resolve(b.key.dtype), compute=b.dtypes.compute) for b in trainable]
        for each in dtypes if self.integers is not None else ():
            each.as_integers()
        for bucket, each in zip(trainable, dtypes, strict=True):
            bucket.send_as(each)
        self.policy = policy

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps, by role: weights (compute, main), main_grads, optimizer, padding, buffers; and
        gradient_sums, if these are integers or on another device, separate from the main gradients.

        Between `zero_grad` and the next reduction, shards of main_grads are not allocated.
        """
        states = sum(each.state_bytes() for each in self.local_steps)
        total = Counter(compute_weights=0, main_weights=0, main_grads=0, padding=0, optimizer=states)
        for bucket in self.buckets:
            total.update(bucket.persistent_bytes())
        scales = sum(bucket.codec.scale_bytes for bucket in self.buckets if bucket.codec)
        return {**total, "buffers": sum(buffer.nbytes for buffer in self.module.buffers()) + scales}

    def settle(self) -> None:
        """Before state is given away, or taken. RuntimeError: parameters have other names by now; or unsharded ones
        were edited."""
        self.weights.refuse_edits()
        self.weights.before_edit()  # by whoever is given them
        check_names(self.module)

    def local_gradients(self) -> dict[str, Tensor]:
        return {
            name: row.detach()
            for bucket in self.gradients.collect()
            for name, row in bucket.cuts.own_rows(bucket.grad_shards)
        }

    def counters(self) -> dict[str, int]:
        """transient_peak_bytes: most bytes of temporary buckets (gathered weights, unreduced gradients) alive at once,
        since the model was built or `memory.reset_peak` was called."""
        return {"transient_peak_bytes": self.memory.peak_bytes}

    def close(self) -> None:
        """Remove hooks and end threads, once reductions in flight have ended; after an alarm of the watchdog none is
        waited for. The module keeps the weights that it holds now."""
        try:
            if self.watchdog is None or self.watchdog.message is None:
                self.reduce.drain()
                self.weights.wait()
        finally:
            end_watch(self.watchdog)
            for handle in self.hooks.handles:
                handle.remove()
            self.hooks.handles.clear()
            self.user_buffers.close()


def engine_of(model: nn.Module) -> Engine:
    return cast(Engine, model.__dict__[ENGINE])


def _check_same_request(module: nn.Module, context: BuildContext, meshes: Meshes) -> None:
    """Raise RanksDisagree where ranks are about to shard other parameters, but for experts, have other buffers, or give
    other arguments. *Collective.*"""
    asked = vars(context.options) | {
        name: getattr(context, name) for name in ("strategy", "outer_strategy", "policy", "grad_divisor")
    }
    asked.pop("watchdog_timeout_s")
    lines = [
        (f"parameter {name}", f"{_kind(param)} {'trained' if param.requires_grad else 'frozen'}")
        for name, param in module.named_parameters()
        if not is_expert(param)
    ]
    lines += [(f"buffer {name}", _kind(buffer)) for name, buffer in module.named_buffers()]
    lines += [(f"argument {name}", str(getattr(value, "value", value))) for name, value in asked.items()]
    check_agreed(
        lines,
        meshes.dense.everyone,
        "what is sharded, and how",
        "ranks shard modules that are not alike, or with other arguments",
        "All ranks must build the same module, with the same requires_grad, before it is sharded in one way",
    )


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
