"""Reading the arguments of megatron-fsdp: unit classes by path, a dimension of a mesh, and what is not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.comm.mesh import Groups
from harness.fsdp.policy import refuse_renamed

UNBUILT = {
    "tp_dim": None,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "keep_fp8_transpose_cache": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "enable_fine_grained_param_gather": False,
    "cuda_graph_mode": False,
    "maxpool_double_buffer": False,
}
"""Arguments of megatron-fsdp that are not built, with the one value that asks for nothing."""


def resolve_classes(modules: Sequence[type[nn.Module] | str]) -> list[type[nn.Module]]:
    """Unit classes, those given by dotted path imported.

    Raises:
        ValueError: one is no importable path, or no module class.
    """
    classes = []
    for each in modules:
        if isinstance(each, str):
            path, _, name = each.rpartition(".")
            try:
                each = getattr(import_module(path), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"fsdp_unit_modules: {each!r} is no importable class path ({error})") from error
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise ValueError(f"fsdp_unit_modules: {each!r} is no nn.Module class")
        classes.append(each)
    return classes


def refuse_unbuilt(arguments: Mapping[str, Any]) -> None:
    """Refuse every argument that asks for something.

    Raises:
        NotImplementedError: megatron-fsdp has it, it is not built here, and its value asks for something.
        TypeError: nobody knows it, or another name took its place.
    """
    refuse_renamed(arguments, "fully_shard")
    for name, value in arguments.items():
        if name not in UNBUILT:
            raise TypeError(f"fully_shard got an unexpected argument {name!r}")
        if value != UNBUILT[name]:
            raise NotImplementedError(f"{name}={value!r} is not built; only {name}={UNBUILT[name]!r} is accepted")


def groups_of(
    mesh: DeviceMesh | None,
    inner: str | None,
    outer: str | None,
    everyone: dist.ProcessGroup | None = None,
    gather: dist.ProcessGroup | None = None,
) -> Groups:
    """The process groups of one or two dimensions of a mesh; the default group without a mesh.

    Args:
        inner, outer: names of dimensions. everyone: of all ranks of both; made where it is None (*collective*).

    Raises:
        ValueError: the mesh has no such dimension, or there is no mesh.
    """
    if mesh is None:
        for argument, name in (("dp_shard_dim", inner), ("dp_outer_dim", outer)):
            if name is not None:
                raise ValueError(f"{argument}={name!r} names a mesh dimension, but device_mesh is None")
        if everyone is not None:
            raise ValueError("hybrid_fsdp_group needs device_mesh and dp_outer_dim beside it")
        return Groups(gather=gather)
    shard = mesh.get_group() if inner is None and mesh.ndim == 1 else mesh.get_group(_dim(mesh, "dp_shard_dim", inner))
    if outer is None:
        if everyone is not None:
            raise ValueError("hybrid_fsdp_group was given without dp_outer_dim; give both, or neither")
        return Groups(shard, gather=gather)
    replicas = mesh.get_group(_dim(mesh, "dp_outer_dim", outer))
    if everyone is None:
        flat = mesh[(outer, _dim(mesh, "dp_shard_dim", inner))]._flatten()
        everyone = flat.get_group()
    return Groups(shard, replicas, everyone, gather)


def _dim(mesh: DeviceMesh, argument: str, name: str | None) -> str:
    names = mesh.mesh_dim_names or ()
    if name is None or name not in names:
        raise ValueError(f"{argument}={name!r} is not a dimension of the device mesh; it has {', '.join(names)}")
    return name
