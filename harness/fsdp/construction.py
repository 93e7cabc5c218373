"""How a sharded model is built: from what was asked for to components that are wired to each other.

The order is the same on all ranks, and part of the contract between them: groups are made, values are broadcast and
buffers are registered in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.fixed_point import FixedPoint
from harness.fsdp.comm.gradient_format import Integers
from harness.fsdp.comm.mesh import Groups, Mesh, Meshes
from harness.fsdp.comm.user_buffers import Member, UserBuffers
from harness.fsdp.components import Components
from harness.fsdp.guards.agreement import check_agreed, check_copies, check_plan
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.guards.replicas import CopiedGradients, ReplicaCheck, held_by_several
from harness.fsdp.guards.watches import Watches, watch_groups
from harness.fsdp.options import Options
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.abandoned import abandon
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.runtime.materialize import build_units, leave_meta, reset_by_module, values_of_first_rank
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Step, StepShape
from harness.fsdp.runtime.trainability import WORDS, Trainability
from harness.fsdp.runtime.two_encodings import pipeline_of
from harness.fsdp.runtime.units import Unit, buckets_of, is_expert, plan_units
from harness.fsdp.runtime.usage import Usage
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.runtime.whole_weights import WholeWeights
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.bucket_context import BucketContext, BucketKey, GradientPlan, InitialValue
from harness.fsdp.storage.codec import Scales, mark_weights
from harness.fsdp.storage.dtensors import DTensorFactory
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.parameter_access import slots_of
from harness.fsdp.storage.placement import SHARD, Placements
from harness.fsdp.tensor_parallel.declared import declare, mesh_of
from harness.fsdp.tensor_parallel.parameters import axis_of
from harness.fsdp.vocabulary import Fallback, OuterStrategy, Registration, Strategy
from harness.fsdp.wiring import make_reductions


@dataclass(frozen=True)
class Ranks:
    """Who shards, and where buckets live.

    expert_groups: of the parameters of experts; None: as the others. device: of the buckets; decided.
    """

    groups: Groups
    expert_groups: Groups | None
    device: torch.device


@dataclass(frozen=True)
class Values:
    """Where parameters get their values: from a function of their names, from modules that reset themselves, or, with
    neither, from what the first rank's parameters hold."""

    initial: InitialValue | None
    init_on_meta: bool

    @property
    def are_made(self) -> bool:
        """True if weights come from elsewhere than the parameters themselves."""
        return self.initial is not None or self.init_on_meta


@dataclass(frozen=True)
class Request:
    """The request, each value valid by itself; `harness.fsdp.model.ShardedModel` describes the fields.

    grad_divisor: None is the number of ranks.
    """

    module: nn.Module
    unit_classes: list[type[nn.Module]]
    ranks: Ranks
    values: Values
    grad_divisor: float | None
    strategy: Strategy
    outer_strategy: OuterStrategy
    policy: MixedPrecisionPolicy
    options: Options

    @cached_property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return self.ranks.groups.tensor or axis_of(self.module.parameters())


@dataclass(frozen=True)
class Ground:
    """Context of building units: ranks, memory, and the numbers that sums are made of.

    integers: how gradients are written under numerics=exact; else None.
    """

    runtime: DeviceRuntime
    meshes: Meshes
    user_buffers: UserBuffers
    memory: BucketMemory
    divisor: float
    integers: Integers | None


def build(request: Request) -> Components:
    """Shard the module in place and wire its components. *Collective.*

    Raises:
        ValueError: parameters have no values, groups do not form a grid, or a value does not fit the model.
        RuntimeError: user buffers could not be registered, and nothing else was allowed.
    """
    declare(request.module, partial(_meshes_for, request))
    check_plan(request.module, request.ranks.groups, request.tensor_group)
    mark_weights(request.module)
    leave_meta(request.module, request.ranks.device, has_values=request.values.are_made)
    ground = _ground(request)
    units = _units(request, ground)
    components = _wire(request, ground, units)
    components.weights.agree_on_scales()
    components.user_buffers.model_built()
    _shard_parameters(request.module, components)
    ground.runtime.keep_pages()
    groups = [comm.group for comm in ground.meshes.moving.values()]
    parts = components.reduce, components.gather, components.weights, components.watches
    weakref.finalize(components, abandon, ground.runtime, groups, *parts).atexit = False
    return components


def _shard_parameters(module: nn.Module, components: Components) -> None:
    shards, slots = DTensorFactory(components.buckets), slots_of(module)
    found, weights = [], weakref.ref(components.weights)

    def before_write() -> None:
        if (kept := weights()) is not None:  # else the model is gone, and nobody reads its weights
            kept.before_edit()

    for bucket in components.buckets:
        bucket.installed_version = bucket.main_version
        found.append(ShardedParameters(bucket, shards, slots, before_write))
        bucket.views.sharded = weakref.ref(found[-1])
        bucket.rest()
    components.gradients.show(found)
    components.hooks.of_forward.before_forward = WeakHook(components.weights.bring_up_to_date)


def _meshes_for(request: Request, part: nn.Module) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Meshes for a module that declares its own; see [Note: Declared meshes]. *Collective.*"""
    groups, tensor, kind = request.ranks.groups, request.tensor_group, request.ranks.device.type
    if request.ranks.expert_groups is not None and any(is_expert(param) for param in part.parameters(recurse=False)):
        groups = request.ranks.expert_groups
    has_outer = _of_several(groups.outer) is not None
    placements = Placements.of(request.strategy, request.outer_strategy if has_outer else None)
    data, tensor_cut = (_of_several(each) for each in (_cutting(groups, placements), tensor))
    tp_mesh = None if tensor is None else DeviceMesh.from_group(tensor, kind)
    return tp_mesh, mesh_of(data, tensor_cut, kind)


def _of_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group; None of one rank."""
    return None if group is None or dist.get_world_size(group) == 1 else group


def _cutting(groups: Groups, placements: Placements) -> dist.ProcessGroup | None:
    """The data-parallel ranks that keep other parts of main weights than this one; None where each keeps them whole."""
    inner, outer = (axis is SHARD for axis in (placements.main_weights.inner, placements.main_weights.outer))
    if inner and outer:
        return groups.everyone
    if outer:
        return groups.outer
    return (groups.inner or dist.group.WORLD) if inner else None


def _ground(request: Request) -> Ground:
    options, device = request.options, request.ranks.device
    runtime = DeviceRuntime(device)
    meshes = _meshes(request, runtime)
    user_buffers = UserBuffers(
        options.nccl_ub,
        [Member(name, comm.group, device) for name, comm in meshes.moving.items() if comm.size > 1],
        runtime,
        symmetric=not options.disable_symmetric_registration,
        may_fall_back=options.registration_fallback is Fallback.record,
    )
    memory = BucketMemory(
        device, fixed=options.double_buffer, allocating=user_buffers.allocating, registers=user_buffers.active
    )
    divisor = float(meshes.dense.everyone.size if request.grad_divisor is None else request.grad_divisor)
    fixed = FixedPoint.asked_for(options)
    integers = None if fixed is None else Integers(fixed, divisor, device)
    return Ground(runtime, meshes, user_buffers, memory, divisor, integers)


def _meshes(request: Request, runtime: DeviceRuntime) -> Meshes:
    limit, separate = request.options.eager_limit_bytes, request.options.separate_gather_group
    dense = Mesh(request.ranks.groups, runtime, limit, separate)
    groups = request.ranks.expert_groups
    experts = dense if groups is None else Mesh(groups, runtime, limit, separate)
    tensor = request.tensor_group
    return Meshes(dense, experts, None if tensor is None else Communicator(tensor, runtime, limit))


def _units(request: Request, ground: Ground) -> list[Unit]:
    options, initial = request.options, request.values.initial
    gradients = GradientPlan(
        ground.memory,
        options.grad_buffer,
        options.accumulate_unsharded,
        ground.integers is not None,
        torch.device("cpu") if options.offload_optimizer else None,
    )

    def context(key: BucketKey) -> BucketContext:
        meshes = ground.meshes
        return BucketContext(
            gradients,
            meshes.of(expert=key.expert),
            request.strategy,
            request.outer_strategy,
            meshes.tensor,
        )

    _check_same_module(request.module, ground.meshes)
    if not request.values.are_made:
        check_copies(request.module, ground.meshes.tensor)
        initial = values_of_first_rank(request.module, ground.meshes)
    plans = plan_units(request.module, request.unit_classes, options.unit_min_elements)
    units = build_units(plans, context, ground.memory, request.policy, initial)
    if initial is None:
        reset_by_module(request.module, list(buckets_of(units)), ground.meshes, request.ranks.device)
    return units


def _check_same_module(module: nn.Module, meshes: Meshes) -> None:
    """Raise RanksDisagree where ranks are about to shard other parameters, but for experts, or have other buffers.
    *Collective.*"""
    told = [
        (f"parameter {name}", f"{_kind(p)} {WORDS[p.requires_grad]}")
        for name, p in module.named_parameters()
        if not is_expert(p)
    ]
    told += [(f"buffer {name}", _kind(buffer)) for name, buffer in module.named_buffers()]
    check_agreed(
        told,
        meshes.dense.everyone,
        "parameters and buffers of the module",
        "ranks shard modules that are not alike",
        "All ranks must build the same module, with the same requires_grad, before it is sharded",
    )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _wire(request: Request, ground: Ground, units: list[Unit]) -> Components:
    options, meshes, runtime = request.options, ground.meshes, ground.runtime
    buckets = list(buckets_of(units))
    trainable = [bucket for bucket in buckets if bucket.trainable]
    guard = GradientGuard(trainable, meshes.everyone) if options.report_nan_in_param_grad else None
    step = Step(_step_shape(request, ground))
    gather = pipeline_of(units, meshes.dense.everyone, runtime, options.prefetch, options.prefetch_limit_bytes)
    reductions_of = partial(make_reductions, options.numerics, ground.integers)
    reductions = {bucket.name: reductions_of(bucket) for bucket in trainable}
    reduce = ReducePipeline(
        units,
        reductions,
        meshes,
        runtime,
        ground.memory,
        step,
        factor=1.0 / ground.divisor,
        guard=guard,
        before_wait=gather.pass_turn,
    )
    hooks = Hooks(units, gather, reduce, step, guard)
    watches = _watch(options, meshes, runtime, hooks)
    replicas = ReplicaCheck(lambda: held_by_several(buckets, meshes), options.check_replicas_every)
    held = [(each.codec, each.main_shards, each.context.mesh) for each in buckets]
    scales = Scales.of(request.module, held, meshes, is_expert)
    weights = WeightInstaller(buckets, gather, ground.user_buffers, replicas, step, scales)
    usage = Usage.of(meshes, trainable)
    copies = CopiedGradients(lambda: [bucket for unit in units for bucket in unit.trainable], meshes)
    gradients = GradientSync(units, step, hooks, reduce, weights, guard, ground.integers, usage, copies)
    fixed = _laid_out_once(options)
    trainability = Trainability(
        units, meshes, request.policy, reductions_of, hooks, weights, reduce, gradients, guard, fixed
    )
    return Components(
        runtime=runtime,
        meshes=meshes,
        memory=ground.memory,
        user_buffers=ground.user_buffers,
        divisor=ground.divisor,
        units=units,
        step=step,
        guard=guard,
        gather=gather,
        reduce=reduce,
        hooks=hooks,
        weights=weights,
        gradients=gradients,
        trainability=trainability,
        watches=watches,
        whole=WholeWeights(request.module, units, gather, hooks, weights, meshes),
    )


def _step_shape(request: Request, ground: Ground) -> StepShape:
    placed = [Placements.of(request.strategy, request.outer_strategy if m.has_outer else None) for m in ground.meshes]
    locally = any(each.accumulates_locally for each in placed)
    reduces_once = any(each.reduces_once for each in placed)
    unsharded = request.options.accumulate_unsharded
    integers = ground.integers
    return StepShape(
        reduces_each=not (locally or unsharded) or integers is not None,
        reduces_once=reduces_once,
        accumulates=reduces_once or unsharded,
        exact_terms=None if integers is None else integers.fixed.terms,
        num_ranks=ground.meshes.dense.everyone.size,
    )


def _laid_out_once(options: Options) -> str:
    if options.double_buffer:
        return "under double_buffer=True, whose buffers are laid out once"
    if options.nccl_ub is not Registration.none:
        return f"under nccl_ub={options.nccl_ub.name}, whose buffers are registered once"
    return ""


def _watch(options: Options, meshes: Meshes, runtime: DeviceRuntime, hooks: Hooks) -> Watches:
    groups = [meshes.dense.everyone.group, *(comm.group for mesh in meshes for comm in mesh.communicators)]
    groups += [] if meshes.tensor is None else [meshes.tensor.group]
    return watch_groups(groups, runtime, options.watchdog_timeout_s, options.check_collectives, _where(hooks))


def _where(hooks: Hooks) -> Callable[[], str]:
    seen = weakref.ref(hooks)

    def where() -> str:
        found = seen()
        return "after its model was deleted" if found is None else found.where()

    return where
