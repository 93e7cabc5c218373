"""Preconditions of a module that is to be sharded: checked before anything is changed. Errors say what to do."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from harness.fsdp.build import Engine
from harness.private_torch import parameters_of

ENGINE = "_fsdp"
"""Key of a sharded module's `__dict__`: its engine."""
PART = "_part_of_sharded"
"""Key of the `__dict__` of every part of a sharded module: a weak reference to the engine."""
TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules that make sparse gradients, or edit their weights in a forward, when they are asked to."""
SCRIPTED = (torch.jit.ScriptModule,)
OTHER_ENGINES = (
    *("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed._composable"),
    *("deepspeed", "megatron_fsdp"),
)
MANAGED = "_is_fsdp_managed_module"
"""Attribute of all that torch's FSDP1 and FSDP2 manage."""


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded module."""
    found: Engine = model.__dict__[ENGINE]
    return found


def own_class(module: nn.Module) -> Any:
    """The module's class, without the engine's mix-in."""
    return getattr(type(module), "_own_class", type(module))


def live(reference: weakref.ref[Engine]) -> Engine | None:
    """An engine; None where it is gone or closed."""
    engine = reference()
    return None if engine is None or engine.is_closed else engine


def check_request(module: nn.Module, unit_classes: Sequence[type[nn.Module]], grad_divisor: float | None) -> None:
    """Refuse what cannot be sharded.

    Raises:
        ValueError: of the module, a part of it, its parameters, the unit classes or the divisor: what is wrong with it.
    """
    if grad_divisor is not None and not grad_divisor > 0:
        raise ValueError(f"grad_divisor={grad_divisor} must be positive")
    if ENGINE in vars(module):
        raise ValueError(f"{own_class(module).__name__} is sharded already; shard a module once")
    for path, part in module.named_modules():
        _check_part(path or "the module", part)
    params = list(module.named_parameters())
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters to shard: shard the module that has them")
    for name, param in params:
        _check_param(name, param)
    _check_apart(params)
    _check_views(module, params)
    _check_names(module, params)
    _check_units(module, unit_classes)


def _check_part(path: str, part: nn.Module) -> None:
    kind = own_class(part).__name__
    if ENGINE in vars(part) or (PART in vars(part) and live(vars(part)[PART]) is not None):
        raise ValueError(
            f"{path} ({kind}) is sharded already, by itself or as a part of another model: shard the outermost module"
            " once, and name what is gathered together in fsdp_unit_modules"
        )
    if hasattr(part, MANAGED) or any(base.__module__.startswith(OTHER_ENGINES) for base in type(part).__mro__):
        raise ValueError(
            f"{path} ({kind}) is wrapped by another data-parallel engine, which would reduce gradients too: shard the"
            " plain module"
        )
    if isinstance(part, SCRIPTED):
        raise ValueError(
            f"{path} ({kind}) is made by torch.jit.script or trace, which has no hooks that gather weights: shard the"
            " plain module, and compile with torch.compile"
        )
    if isinstance(part, TABLES) and part.sparse:
        raise ValueError(
            f"{path} ({kind}) has sparse=True, and flat buffers hold dense gradients alone: build it with sparse=False"
        )
    if isinstance(part, TABLES) and part.max_norm is not None:
        raise ValueError(
            f"{path} ({kind}) has max_norm={part.max_norm}: each forward scales the rows that this rank's data uses, so"
            " that ranks would have other weights. Build it with max_norm=None, and scale what it gives; or all rows,"
            " between steps, inside `with model.unsharded():`; of a frozen table once, before sharding, by"
            f" torch.renorm(weight, {part.norm_type:g}, 0, {part.max_norm:g})"
        )


def _check_param(name: str, param: nn.Parameter) -> None:
    kind = type(param).__name__
    if is_lazy(param):
        raise ValueError(
            f"parameter {name} has no shape yet ({kind} of a lazy module): run one forward before sharding, or build"
            " the module with its sizes"
        )
    if hasattr(param, "__tensor_flatten__") and not isinstance(param, DTensor):
        raise ValueError(
            f"parameter {name} is a {kind}, a tensor around others, and flat buffers hold plain numbers: shard the"
            " model before its weights are converted; for 8 bits there is harness.fsdp.Fp8Linear.convert"
        )
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"parameter {name} has dtype {param.dtype}; only floating-point parameters can be sharded: make one that is"
            " not trained a buffer (register_buffer), and of a complex one its real view"
            " (nn.Parameter(torch.view_as_real(w)), and torch.view_as_complex of that in the forward)"
        )


def _check_names(module: nn.Module, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    paths = {id(param): path for path, param in nn.Module.named_parameters(module)}
    for name, param in params:
        if paths.get(id(param), name) != name:
            raise ValueError(
                f"{type(module).__name__}.named_parameters() calls {name} what lies at {paths[id(param)]}: shard the"
                " module that it wraps, or one that holds it. Checkpointing of a whole model (checkpoint_wrapper) gains"
                " nothing: wrap its blocks"
            )


def _check_apart(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Each parameter gets a place of its own: what was a view of another one would follow it no more."""
    for (_, end, name), (begin, _, other) in pairwise(sorted(_spans(params))):
        if begin < end:
            raise ValueError(
                f"parameters {name} and {other} share memory, and are not the same parameter: an update of one would"
                " not reach the other any more. Tie them (b.weight = a.weight), use a part of one in the forward"
                " (a.weight[:n]), or make one a copy (clone())"
            )


def _check_views(module: nn.Module, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Views of a parameter that a module keeps, as buffers or attributes, stay behind where that moves."""
    spans = sorted(_spans(params))  # which lie apart
    begins = [begin for begin, _, _ in spans]
    for begin, end, kept in _spans(_kept(module)):
        before = bisect_left(begins, end) - 1
        if before >= 0 and begin < spans[before][1]:
            raise ValueError(
                f"{kept} shares memory with parameter {spans[before][2]} without being it: the parameter moves when it"
                f" is sharded, and {kept} would keep the old values. Use the parameter itself in the forward"
                " (self.weight.t(), self.weight[:n]), or make what is kept a copy (clone())"
            )


def _kept(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors among the attributes of modules or one container deep in them, that are no parameters."""
    yield from module.named_buffers()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if f"{name}_orig" in parameters_of(part):  # spectral_norm and pruning make it anew before each forward
                continue
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for each in held:
                if isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
                    yield f"{path}.{name}".lstrip("."), each


def _spans(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, int, str]]:
    for name, each in named:
        if each.layout is torch.strided and not each.is_meta and each.numel() and type(each.data) is Tensor:
            yield each.data_ptr(), each.data_ptr() + _reach(each) * each.itemsize, name


def _reach(param: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))


def _check_units(module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """At least one class must match: a list may serve several models."""
    if not classes or any(isinstance(part, tuple(classes)) for part in module.modules()):
        return
    there = sorted({type(part).__name__ for part in module.modules() if next(part.parameters(), None) is not None})
    raise ValueError(
        f"fsdp_unit_modules={[each.__name__ for each in classes]} matches no module of {type(module).__name__}, so that"
        f" everything would be one unit; it has {', '.join(there)}. Name some of these, or give no list"
    )
