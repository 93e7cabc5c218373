"""Reading the arguments of megatron-fsdp: unit classes by path, a dimension of a mesh, and what is not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.policy import refuse_renamed

UNBUILT = {
    "dp_outer_dim": None,
    "tp_dim": None,
    "hybrid_fsdp_group": None,
    "hybrid_fsdp_expt_group": None,
    "expt_device_mesh": None,
    "fsdp_group_ag": None,
    "expt_fsdp_group_ag": None,
    "outer_dp_sharding_strategy": 0,
    "init_model_with_meta_device": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "sync_model_each_microbatch": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "keep_fp8_transpose_cache": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "enable_fine_grained_param_gather": False,
    "use_decoupled_grad": False,
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


def group_of(mesh: DeviceMesh | None, dim: str | None) -> dist.ProcessGroup | None:
    """The process group of one dimension of a mesh; None, the default group, without a mesh.

    Raises:
        ValueError: the mesh has no such dimension, or there is no mesh.
    """
    if mesh is None:
        if dim is not None:
            raise ValueError(f"dp_shard_dim={dim!r} names a mesh dimension, but device_mesh is None")
        return None
    names = mesh.mesh_dim_names or ()
    if dim is None and mesh.ndim == 1:
        return mesh.get_group()
    if dim not in names:
        raise ValueError(f"dp_shard_dim={dim!r} is not a dimension of the device mesh; it has {', '.join(names)}")
    return mesh.get_group(dim)
