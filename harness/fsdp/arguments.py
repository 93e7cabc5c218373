"""How arguments are read: unit classes by path, dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.comm.mesh import Groups
from harness.private_torch import flatten_mesh


def resolve_classes(modules: Sequence[type[nn.Module] | str]) -> list[type[nn.Module]]:
    """Unit classes, those given by dotted path imported.

    Raises:
        ValueError: it is no list; or one is no importable path, or no module class.
    """
    if isinstance(modules, str | type | nn.Module) or not isinstance(modules, Iterable):
        kind = modules.__name__ if isinstance(modules, type) else f"a {type(modules).__name__}"
        raise ValueError(
            f"fsdp_unit_modules is no list but {kind}: give one of classes or dotted paths, as"
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
            raise ValueError(f"fsdp_unit_modules: {each} is no nn.Module class; give classes, or dotted paths of them")
        classes.append(each)
    return classes


def groups_of_mesh(mesh: DeviceMesh) -> Groups:
    """The process groups of a mesh of one dimension, or of two, as FSDP2 reads it: replicas, then shards.

    Raises:
        ValueError: it has more dimensions.
    """
    if mesh.ndim > 2:
        raise ValueError(f"mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}); give one, or two: replicas, shards")
    if mesh.ndim == 1:
        return Groups(mesh.get_group())
    return Groups(mesh.get_group(1), mesh.get_group(0), flatten_mesh(mesh).get_group())


def groups_of(
    mesh: DeviceMesh | None,
    inner: str | None,
    outer: str | None,
    tensor: str | None = None,
    everyone: dist.ProcessGroup | None = None,
    gather: dist.ProcessGroup | None = None,
) -> Groups:
    """The process groups of one or two dimensions of a mesh; the default group without a mesh.

    Args:
        inner, outer, tensor: names of dimensions, flattened ones among them. everyone: of all ranks of inner and outer;
            made where it is None (*collective*).

    Raises:
        ValueError: the mesh has no such dimension, or there is no mesh; or `everyone` is missing beside flattened ones.
    """
    if everyone is not None and (mesh is None or outer is None):
        raise ValueError("hybrid_fsdp_group was given without device_mesh or dp_outer_dim; give all, or none")
    if mesh is None:
        for argument, name in (("dp_shard_dim", inner), ("dp_outer_dim", outer), ("tp_dim", tensor)):
            if name is not None:
                raise ValueError(f"{argument}={name!r} names a mesh dimension, but device_mesh is None")
        return Groups(gather=gather)
    shard = mesh.get_group() if inner is None and mesh.ndim == 1 else _group(mesh, "dp_shard_dim", inner)
    tensors = None if tensor is None else _group(mesh, "tp_dim", tensor)
    if outer is None:
        return Groups(shard, gather=gather, tensor=tensors)
    replicas = _group(mesh, "dp_outer_dim", outer)
    return Groups(shard, replicas, everyone or _flattened(mesh, outer, inner), gather, tensors)


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
    return flatten_mesh(mesh[(outer, inner)]).get_group()
