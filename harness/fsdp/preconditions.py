"""How arguments are read, and what cannot be sharded: before anything is changed. Errors say what to do."""

from __future__ import annotations

import pydoc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.mesh import Groups, kept_group
from harness.private_torch import parameters_of

OTHER_ENGINES = (
    *("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed._composable"),
    *("deepspeed", "megatron_fsdp"),
)
MANAGED = "_is_fsdp_managed_module"  # attribute of all that torch's FSDP1 and FSDP2 manage
UNITS = "unit_modules (fully_shard_model: fsdp_unit_modules)"  # name of the list of units, under both entries


def resolve_classes(modules: Iterable[type[nn.Module] | str]) -> list[type[nn.Module]]:
    """Unit classes, those given by dotted path imported. Raises ValueError: one is no module class, or path of one."""
    classes = []
    for each in modules:
        found: Any = pydoc.locate(each) if isinstance(each, str) else each
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ValueError(f"{UNITS}: {each!r} is no nn.Module class; give classes, or dotted paths of them")
        classes.append(found)
    return classes


def groups_of_mesh(mesh: DeviceMesh) -> Groups:
    """The process groups of a mesh of one dimension, or of two, as FSDP2 reads it: replicas, then shards. Raises
    ValueError: it has more dimensions."""
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}); give one, or two: replicas, shards")
    if mesh.ndim == 1:
        return Groups(mesh.get_group())
    return Groups(mesh.get_group(1), mesh.get_group(0), _all_ranks_of(mesh))


def groups_of(
    mesh: DeviceMesh | None,
    inner: str | None,
    outer: str | None,
    tensor: str | None = None,
    everyone: dist.ProcessGroup | None = None,
    gather: dist.ProcessGroup | None = None,
) -> Groups:
    """The process groups of one or two dimensions of a mesh; the default group without a mesh.

    inner, outer, tensor: names of dimensions, flattened ones among them. everyone: of all ranks of inner and outer;
    made where it is None (*collective*). Raises ValueError: there is no mesh; or as `DeviceMesh.get_group`.
    """
    if everyone is not None and (mesh is None or outer is None):
        raise ValueError("hybrid_fsdp_group was given without device_mesh or dp_outer_dim; give all, or none")
    if mesh is None:
        if (inner, outer, tensor) != (None, None, None):
            raise ValueError(
                f"dp_shard_dim={inner!r}, dp_outer_dim={outer!r}, tp_dim={tensor!r}, but device_mesh is None"
            )
        return Groups(gather=gather)
    outside = None if outer is None else mesh.get_group(outer)
    if outer is not None and everyone is None:
        everyone = _all_ranks_of(mesh[cast("tuple[str, ...]", (outer, inner))])
    tensors = None if tensor is None else mesh.get_group(tensor)
    return Groups(mesh.get_group(inner), outside, everyone, gather, tensors)


def _all_ranks_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    return kept_group(mesh.get_group(0), tuple(mesh.mesh.flatten().tolist()), "fsdp_everyone")


def check_request(
    module: nn.Module, kind: type[nn.Module], unit_classes: Sequence[type[nn.Module]], grad_divisor: float | None
) -> None:
    """Raise ValueError for what cannot be sharded: the module, a part of it, its parameters, the unit classes, or the
    divisor. kind: what is mixed into the module's class."""
    if grad_divisor is not None and not grad_divisor > 0:
        raise ValueError(f"grad_divisor={grad_divisor} must be positive")
    for path, part in module.named_modules():
        own = getattr(type(part), "_own_class", type(part)).__name__
        _refuse(PARTS, part, f"{path or 'the module'} ({own})")
    params = list(module.named_parameters())
    if not params:
        raise ValueError(f"{type(module).__name__} has no parameters to shard: shard the module that has them")
    for name, param in params:
        _refuse(PARAMS, param, f"parameter {name}")
    _check_free(module, kind)
    _check_apart(module, params)
    _check_names(module, params)
    _check_units(module, unit_classes)


PARTS: dict[str, Callable[[Any], Any]] = {  # words that follow a part that cannot be sharded, and how it is known
    "is wrapped by another data-parallel engine, which would reduce gradients too: shard the plain module": (
        lambda part: hasattr(part, MANAGED) or any(b.__module__.startswith(OTHER_ENGINES) for b in type(part).__mro__)
    ),
    f"is sharded already, by itself or as a part of another model: shard the outermost module once, and name what is"
    f" gathered together in {UNITS}": lambda part: vars(part).get("__reduce_ex__") is refuse_copy,
    "is made by torch.jit.script or trace, which has no hooks that gather weights: shard the plain module, and compile"
    " with torch.compile": lambda part: isinstance(part, torch.jit.ScriptModule),
    "has max_norm={0.max_norm}: each forward scales the rows that this rank's data uses, so that ranks would have other"
    " weights. Build it with max_norm=None, and scale all rows, inside `with model.unsharded():`, or once before"
    " sharding, by torch.renorm(weight, {0.norm_type:g}, 0, {0.max_norm:g})": (
        lambda part: isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    ),
}
PARAMS: dict[str, Callable[[Any], Any]] = {  # words that follow a parameter that cannot be, and how it is known
    "is a {0.__class__.__name__}, a tensor around others, and flat buffers hold plain numbers: shard the model before"
    " its weights are converted; for 8 bits there is harness.fsdp.Fp8Linear.convert": (
        lambda param: hasattr(param, "__tensor_flatten__") and not isinstance(param, DTensor)
    ),
    "has dtype {0.dtype}; only floating-point parameters can be sharded: make one that is not trained a buffer"
    " (register_buffer), and of a complex one its real view (torch.view_as_real)": (
        lambda param: not param.dtype.is_floating_point
    ),
}


def refuse_copy(*_: Any) -> None:
    """Raise TypeError: instead of copy.deepcopy() and pickle; an attribute of every part of a sharded model."""
    raise TypeError(
        "a part of a sharded model cannot be copied, and no sharded model can be pickled (torch.save(model)): copy the"
        " whole by copy.deepcopy(model) on all ranks; save its state_dict() or full_weights()"
    )


def _refuse(reasons: Mapping[str, Callable[[Any], Any]], held: Any, name: str) -> None:
    for reason, is_wrong in reasons.items():
        if is_wrong(held):
            raise ValueError(f"{name} {reason.format(held)}")


def _check_names(module: nn.Module, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    paths = {id(param): path for path, param in nn.Module.named_parameters(module)}
    for name, param in params:
        if paths.get(id(param), name) != name:
            raise ValueError(
                f"{type(module).__name__}.named_parameters() calls {name} what lies at {paths[id(param)]}: shard the"
                " module that it wraps, or one that holds it; of checkpoint_wrapper, wrap its blocks"
            )


def _check_free(module: nn.Module, kind: type[nn.Module]) -> None:
    """Methods of the mix-in would hide what the module has, as a method or submodule, under the same names."""
    own = {*dir(type(module)), *(name for name, _ in (*module.named_children(), *module.named_buffers()))}
    both = sorted(name for name in own & {*vars(kind), *dir(kind)} - {*dir(nn.Module)} if not name.startswith("_"))
    if both:
        raise ValueError(
            f"{type(module).__name__} and a sharded model both have {', '.join(both)}: give the module's another name"
        )


def _check_apart(module: nn.Module, params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Each parameter gets a place of its own: views of it stay behind, as parameters, buffers or attributes."""
    held = [(*span, True) for span in _spans(params)] + [(*span, False) for span in _spans(_kept(module))]
    furthest = {True: (0, ""), False: (0, "")}  # where what began before ends: of parameters, and of others
    for begin, end, name, is_param in sorted(held):
        for other_is_param, (reached, other) in furthest.items():
            if begin < reached and (is_param or other_is_param):
                one, parameter = (other, name) if is_param else (name, other)
                raise ValueError(
                    f"{one} shares memory with parameter {parameter}, and would not follow its updates: tie them"
                    " (b.weight = a.weight), take a view of the parameter in the forward, or a copy (clone())"
                )
        furthest[is_param] = max(furthest[is_param], (end, name))


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
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            yield each.data_ptr(), each.data_ptr() + (1 + last) * each.itemsize, name


def _check_units(module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """At least one class must match: a list may serve several models."""
    if not classes or any(isinstance(part, tuple(classes)) for part in module.modules()):
        return
    there = sorted({type(part).__name__ for part in module.modules() if next(part.parameters(), None) is not None})
    raise ValueError(
        f"{UNITS}, {[each.__name__ for each in classes]} matches no module of {type(module).__name__}; it has"
        f" {', '.join(there)}"
    )
