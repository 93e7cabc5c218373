"""torch's FSDP2 on the recorder, as it is: its streams are recorded, its collectives go as NCCL's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state

from tests.streams.cuda import RecordedCuda
from tests.streams.group import RecordedGroup


@contextmanager
def fsdp2_believing_in(cuda: RecordedCuda) -> Iterator[None]:
    """FSDP2 finds these streams where it looks for those of the CPU."""
    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=cuda))
        stack.enter_context(mock.patch.object(functional, "all_reduce", _all_reduce))
        yield


def _all_reduce(value: Tensor, reduceOp: str, group: tuple[DeviceMesh, int], tag: str = "") -> Tensor:
    """torch's functional all-reduce, which has no way to a group that is made in Python, and its wait."""
    if reduceOp != "sum":
        raise ValueError(f"the recorder sums a DTensor's parts, and nothing else: {reduceOp}")
    mesh, dim = group
    whole = value.clone()
    mesh.get_group(dim).allreduce([whole]).wait()
    return whole


def sharded(
    module: nn.Module, units: list[nn.Module], group: RecordedGroup, reduce_dtype: torch.dtype, **more: Any
) -> None:
    """Shard the units, and the rest, with bf16 weights in use."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, **more)
    fully_shard(module, mesh=mesh, mp_policy=policy, **more)
