"""Reading the arguments of megatron-fsdp: unit classes by path, a dimension of a mesh, and what is not built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Literal, TypedDict, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.comm.mesh import Groups
from harness.fsdp.options import OPTIONS, OptionKeywords, refuse_unknown
from harness.fsdp.policy import MixedPrecisionPolicy, refuse_renamed
from harness.fsdp.storage.bucket_context import InitialValue
from harness.fsdp.vocabulary import OuterStrategy, Strategy


class UnbuiltKeywords(TypedDict, total=False):
    """Arguments of megatron-fsdp that are not built; the type of each is the one value that asks for nothing."""

    overlap_grad_reduce: Literal[True]
    overlap_param_gather: Literal[True]
    preproc_state_dict_for_dcp_ckpt: Literal[True]
    average_in_collective: Literal[False]
    disable_bucketing: Literal[False]
    keep_fp8_transpose_cache: Literal[False]
    fsdp_db_use_persist_buf_on_alloc_fail: Literal[False]
    enable_fine_grained_param_gather: Literal[False]
    cuda_graph_mode: Literal[False]


UNBUILT: dict[str, Any] = {
    name: next(iter(get_args(kind)), None) for name, kind in get_type_hints(UnbuiltKeywords).items()
}
"""Arguments of megatron-fsdp that are not built, with the one value that asks for nothing."""


class OtherKeywords(OptionKeywords, UnbuiltKeywords, total=False):
    """What `fully_shard_model` takes beside the arguments that it spells out."""


class ShardKeywords(OtherKeywords, total=False):
    """What `fully_shard` hands on to `fully_shard_model`, whose signature has the defaults."""

    device_mesh: DeviceMesh | None
    dp_shard_dim: str | None
    dp_outer_dim: str | None
    tp_dim: str | None
    hybrid_fsdp_group: dist.ProcessGroup | None
    expt_device_mesh: DeviceMesh | None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None
    fsdp_group_ag: dist.ProcessGroup | None
    expt_fsdp_group_ag: dist.ProcessGroup | None
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None
    zero_dp_strategy: Strategy | str | int
    outer_dp_sharding_strategy: OuterStrategy | str | int
    device: torch.device | None
    init_model_with_meta_device: bool
    mixed_precision_policy: MixedPrecisionPolicy | None
    sync_model_each_microbatch: bool
    calculate_per_token_loss: bool
    grad_divisor: float | None
    fsdp_double_buffer: bool
    maxpool_double_buffer: bool
    initial_value: InitialValue | None


def resolve_classes(modules: Sequence[type[nn.Module] | str]) -> list[type[nn.Module]]:
    """Unit classes, those given by dotted path imported.

    Raises:
        ValueError: it is no list; or one is no importable path, or no module class.
    """
    if isinstance(modules, str | type | nn.Module) or not isinstance(modules, Iterable):
        raise ValueError(
            f"fsdp_unit_modules={_shown(modules)} is no list: give one of classes or dotted paths, as"
            " fsdp_unit_modules=[nn.TransformerEncoderLayer]"
        )
    classes = []
    for each in modules:
        if isinstance(each, str):
            path, _, name = each.rpartition(".")
            try:
                each = getattr(import_module(path), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"fsdp_unit_modules: {each!r} is no importable class path ({error})") from error
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise ValueError(
                f"fsdp_unit_modules: {_shown(each)} is no nn.Module class; give classes, or dotted paths of them"
            )
        classes.append(each)
    return classes


def _shown(given: object) -> str:
    """A value in a message: of modules, which are long, their class."""
    if isinstance(given, nn.Module):
        return f"a module of class {type(given).__name__}"
    return given.__name__ if isinstance(given, type) else repr(given)


def without_unbuilt(arguments: OtherKeywords) -> dict[str, Any]:
    """The options among the arguments; every other one is refused if it asks for something.

    Raises:
        NotImplementedError: megatron-fsdp has it, it is not built here, and its value asks for something.
        TypeError: nobody knows it, with the nearest names; or another name took its place.
    """
    refuse_renamed(arguments, "fully_shard")
    refuse_unknown(arguments, "fully_shard", ("module", *ShardKeywords.__annotations__))
    for name, value in arguments.items():
        if name in UNBUILT and value != UNBUILT[name]:
            raise NotImplementedError(f"{name}={value!r} is not built; only {name}={UNBUILT[name]!r} is accepted")
    return {name: value for name, value in arguments.items() if name in OPTIONS}


def groups_of(
    mesh: DeviceMesh | None,
    inner: str | None,
    outer: str | None,
    everyone: dist.ProcessGroup | None = None,
    gather: dist.ProcessGroup | None = None,
) -> Groups:
    """The process groups of one or two dimensions of a mesh; the default group without a mesh.

    Args:
        inner, outer: names of dimensions, flattened ones among them. everyone: of all ranks of both; made where it is
            None (*collective*).

    Raises:
        ValueError: the mesh has no such dimension, or there is no mesh; or `everyone` is missing beside flattened ones.
    """
    if mesh is None:
        for argument, name in (("dp_shard_dim", inner), ("dp_outer_dim", outer)):
            if name is not None:
                raise ValueError(f"{argument}={name!r} names a mesh dimension, but device_mesh is None")
        if everyone is not None:
            raise ValueError("hybrid_fsdp_group needs device_mesh and dp_outer_dim beside it")
        return Groups(gather=gather)
    shard = mesh.get_group() if inner is None and mesh.ndim == 1 else _group(mesh, "dp_shard_dim", inner)
    if outer is None:
        if everyone is not None:
            raise ValueError("hybrid_fsdp_group was given without dp_outer_dim; give both, or neither")
        return Groups(shard, gather=gather)
    replicas = _group(mesh, "dp_outer_dim", outer)
    return Groups(shard, replicas, everyone or _flattened(mesh, outer, inner), gather)


def tensor_axis(mesh: DeviceMesh | None, name: str | None) -> dist.ProcessGroup | None:
    """The ranks of the tensor-parallel axis; None where none is named.

    Raises:
        ValueError: the mesh has no such dimension, or there is no mesh.
    """
    if name is None:
        return None
    if mesh is None:
        raise ValueError(f"tp_dim={name!r} names a mesh dimension, but device_mesh is None")
    return _group(mesh, "tp_dim", name)


def _group(mesh: DeviceMesh, argument: str, name: str | None) -> dist.ProcessGroup:
    """The ranks of a dimension of a mesh, or of one that was flattened of several."""
    try:
        if name is not None:
            return mesh.get_group(name)
    except (KeyError, RuntimeError):
        pass
    names = ", ".join(mesh.mesh_dim_names or ()) or "none that has a name"
    raise ValueError(
        f"{argument}={name!r} is not a dimension of the device mesh; it has {names}, and what _flatten made of these"
    )


def _flattened(mesh: DeviceMesh, outer: str, inner: str | None) -> dist.ProcessGroup:
    """All ranks of two dimensions."""
    names = (outer, inner)
    if inner is None or not {*names} <= {*(mesh.mesh_dim_names or ())}:
        raise ValueError(
            f"dp_outer_dim={outer!r} and dp_shard_dim={inner!r}: where one of them is a flattened dimension, give"
            " hybrid_fsdp_group too, the group of all ranks of both"
        )
    return mesh[(outer, inner)]._flatten().get_group()
