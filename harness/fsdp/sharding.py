"""How a module is sharded and copied, has methods run as its forward, and gets an optimizer that steps local rows."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.build import ENGINE, OWNER, BuildContext, Engine, engine_of
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import usual_device
from harness.fsdp.comm.mesh import Groups
from harness.fsdp.guards import check_agreed
from harness.fsdp.options import Numerics, Options, OuterStrategy, Strategy, refuse_unknown
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.preconditions import check_request, groups_of_mesh, refuse_copy, resolve_classes
from harness.fsdp.storage.at_rest import ShardedParameters, sharded_of
from harness.fsdp.storage.param_group import InitialValue, ParamGroup
from harness.fsdp.storage.parameter_access import HOME, grad_of
from harness.fsdp.update.matrices import MatrixStep
from harness.fsdp.update.rules import begins_with_gradient, check_optimizer, create_state_of
from harness.fsdp.update.steps import LocalStep

_RUNS = "_runs_as_forward"  # attribute of a function that takes the place of a module's method


def shard(
    module: nn.Module,
    kind: Any,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    groups: Groups | None = None,
    expert_groups: Groups | None = None,
    unit_modules: Sequence[type[nn.Module] | str] | None = None,
    strategy: Strategy | str | int = Strategy.optim_grads_params,
    outer_strategy: OuterStrategy | str | int = OuterStrategy.no_shard,
    mp_policy: MixedPrecisionPolicy | None = None,
    device: torch.device | str | None = None,
    grad_divisor: float | None = None,
    initial_value: InitialValue | None = None,
    init_on_meta: bool = False,
    **options: Any,
) -> Any:
    """Shard a module in place, mix `kind` into its class, and return it; `harness.fsdp.api.fully_shard` describes the
    arguments. *Collective.*"""
    refuse_unknown(options, "fully_shard", shard.__kwdefaults__ or ())
    chosen = Options(**options)
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise TypeError(f"{mp_policy} is another engine's: give harness.fsdp.MixedPrecisionPolicy with its dtypes")
    classes = resolve_classes(unit_modules or ())
    check_request(module, kind, classes, grad_divisor)
    inner, outer = Strategy.parse(strategy, "strategy"), OuterStrategy.parse(outer_strategy, "outer_strategy")
    groups = groups or (Groups(group) if mesh is None else groups_of_mesh(mesh))
    context = BuildContext(
        groups,
        expert_groups,
        classes,
        inner,
        outer,
        mp_policy or MixedPrecisionPolicy(),
        chosen,
        torch.device(device or usual_device(next(module.parameters()).device, groups.inner)),
        grad_divisor,
        initial_value,
        init_on_meta,
    )
    return _mix_in(module, kind, context, ["generate"] if hasattr(type(module), "generate") else [])


def _mix_in(module: nn.Module, kind: Any, context: BuildContext, methods: Sequence[str]) -> Any:
    """Build an engine, which the module keeps. Its parts then refuse to be copied or pickled, as the engine's hooks on
    them would be too, which also tells that they are sharded."""
    module.__dict__[ENGINE] = Engine(module, context)
    for part in module.modules():
        part.__dict__["__reduce_ex__"] = refuse_copy
    plain: Any = type(module)
    object.__setattr__(module, "__class__", _mixed(kind, plain))
    for name in methods:
        register_forward_method(module, name)
    return module


@cache
def _mixed(kind: type, own: type) -> Any:
    made: Any = type(own)
    return made(f"FSDP{own.__name__}", (kind, own), {"__module__": own.__module__, "_own_class": own})


# -- copies ------------------------------------------------------------------------------------------------------------


def copied(model: nn.Module, memo: dict[int, Any]) -> Any:
    engine = engine_of(model)
    engine.settle()
    context = replace(engine.context, policy=engine.policy, initial_value=lambda _, shape: torch.zeros(shape))
    made = _mix_in(_bare_copy(model, engine, memo), type(model).__mro__[1], context, engine.forward_methods)
    adopt_weights(engine_of(made), engine)
    memo[id(model)] = made
    return made


def adopt_weights(mine: Engine, other: Engine) -> None:
    """Take the weights, and which of them are trained, of a model that is sharded alike. *Collective.*"""
    for bucket, theirs in zip(mine.buckets, other.buckets, strict=True):
        for param, flag in zip(bucket.sharded().params, theirs.sharded().flags(), strict=True):
            param.requires_grad_(flag)
        for shard, values in zip(bucket.main_shards, theirs.main_shards, strict=True):
            shard.detach().copy_(values.detach())
    mine.weights.install()
    mine.step.sync = other.step.sync


def _bare_copy(model: nn.Module, engine: Engine, memo: dict[int, Any]) -> nn.Module:
    """A deep copy as before it was sharded, whose parameters are on the meta device.

    memo: of `copy.deepcopy`; knows the new parameters by the old ones afterwards.
    """
    for bucket in engine.buckets:
        if bucket.tp is not None or bucket.codec is not None:
            kind = "kept in 8 bits" if bucket.codec is not None else "TP shards of a tensor-parallel plan"
            raise NotImplementedError(
                f"a copy of a sharded model whose parameters are {kind}: shard another one, and load state_dict()"
            )
        sharded: ShardedParameters = bucket.sharded()
        for unsharded, at_rest, plain in sharded.pairs:
            memo[id(unsharded)] = memo[id(at_rest)] = _on_meta(at_rest, plain, bucket)
    mixed: Any = type(model)
    parts = [
        (part, {n: v for n, v in vars(part).items() if n in (ENGINE, "__reduce_ex__") or getattr(v, _RUNS, False)})
        for part in mixed.modules(model)
    ]
    try:
        for part, held in parts:
            for name in held:
                del part.__dict__[name]
        object.__setattr__(model, "__class__", mixed._own_class)
        found: nn.Module = copy.deepcopy(model, memo)
    finally:
        object.__setattr__(model, "__class__", mixed)
        for part, held in parts:
            part.__dict__.update(held)
    for hooks in (held for part in found.modules() for held in vars(part).values() if isinstance(held, OrderedDict)):
        for handle in engine.hooks.handles:
            hooks.pop(handle.id, None)
    return found


def _on_meta(param: nn.Parameter, own: type, bucket: ParamGroup) -> Tensor:
    made = nn.Parameter(torch.empty(param.shape, dtype=bucket.key.dtype, device="meta"), bucket.key.trainable)
    made.__class__ = own
    vars(made).update((n, v) for n, v in vars(param).items() if not (n.startswith("_") or n == "base"))
    return made


# -- methods as forwards -----------------------------------------------------------------------------------------------


def register_forward_method(model: nn.Module, name: str) -> None:
    """Run a method, "path.to.submodule.method", as a forward of the model; see [Note: Methods as forwards]. Raises
    AttributeError: there is no such module or method."""
    path, _, last = name.rpartition(".")
    owner, engine = model.get_submodule(path), engine_of(model)
    method: Any = getattr(type(owner), last)
    here, found = weakref.ref(owner), weakref.WeakMethod(engine.hooks.run_as_forward)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = found()
        return method(here(), *args, **kwargs) if run is None else run(method, here(), *args, **kwargs)

    setattr(call, _RUNS, True)
    engine.forward_methods.append(name)
    owner.__dict__[last] = call


_LOCAL_STEP = "_fsdp_local_step"


def bind(engine: Engine, optimizer: torch.optim.Optimizer, *, steps_unused: bool = False) -> None:
    """Let an optimizer step this rank's rows of sharded parameters; see [Note: Local step]. It may step several models.

    Raises as `harness.fsdp.megatron.fully_shard_optimizer`.
    """
    numerics = engine.options.numerics
    check_optimizer(optimizer, engine.buckets, numerics)
    _take_sharded(optimizer)
    local: LocalStep | None = getattr(optimizer, _LOCAL_STEP, None)
    if local is None:
        local = LocalStep(optimizer, _agree_on_matrices)
        setattr(optimizer, _LOCAL_STEP, local)
        optimizer.register_state_dict_pre_hook(_have_state)
        optimizer.register_load_state_dict_post_hook(lambda loaded: getattr(loaded, _LOCAL_STEP).take_loaded())
    local.steps_unused |= steps_unused
    if any(each is local for each in engine.local_steps):
        return
    engine.local_steps.append(local)
    fusable = all(segment.fusable for bucket in engine.buckets for segment in bucket.layout.segments)
    local.unfused |= numerics is Numerics.exact or (numerics.bitwise and not fusable)

    def before() -> None:
        engine.weights.refuse_held()
        engine.weights.refuse_edits()
        engine.gradients.finish()
        engine.weights.before_edit()

    local.before.append(before)
    zero_grad = optimizer.zero_grad

    def forget(set_to_none: bool = True, *, zero_grad_buffer: bool = True) -> None:
        if zero_grad_buffer:
            engine.gradients.forget_unfinished()
        zero_grad(set_to_none)
        if zero_grad_buffer:
            engine.gradients.let_go()

    optimizer.zero_grad = forget  # type: ignore[method-assign] # on the instance: torch has no hook


def _agree_on_matrices(matrices: MatrixStep, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a matrix that has a gradient on some ranks alone: no owner could have the whole. *Collective.*"""
    told: dict[Communicator, list[tuple[str, str]]] = {}
    for _, param in matrices.params(optimizer):
        said = "without a gradient" if grad_of(param) is None else "given one"
        told.setdefault(matrices.comm_of(param), []).append((f"parameter {getattr(param, HOME)[0]}", said))
    for comm, pairs in told.items():
        check_agreed(
            pairs,
            comm,
            "gradients of matrices",
            "a matrix has a gradient on some ranks alone, so that none can work out its update",
            "Set grad to None on all ranks or on none",
        )


def _have_state(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups if not any(optimizer.state.values()) else ():
        if not begins_with_gradient(group):
            create_state_of(optimizer, group)


def _take_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was built before sharding have the sharded parameters, and state of them."""
    for group in optimizer.param_groups:
        sharded = [sharded_of(param) for param in group["params"]]
        for param, made in zip(group["params"], sharded, strict=True):
            if made is not param and param in optimizer.state:
                optimizer.state[made] = optimizer.state.pop(param)
        group["params"] = sharded


def engine_for(optimizer: torch.optim.Optimizer) -> Engine:
    """The engine of the sharded model whose parameters an optimizer has. ValueError: it has none of a sharded model, or
    of several, or that model is gone."""
    params = (sharded_of(each) for group in optimizer.param_groups for each in group["params"])
    found = {owner() for param in params if (owner := getattr(param, OWNER, None)) is not None}
    if len(found) != 1 or None in found:
        raise ValueError(
            f"{type(optimizer).__name__} has parameters of {len(found - {None})} sharded models: build it over those of"
            " one that is kept, or call fully_shard_optimizer(model, optimizer) with each"
        )
    return cast(Engine, found.pop())
