"""Whether what a plan of tensor parallelism left can be sharded; told before anything is changed."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Groups
from harness.fsdp.guards.replicas import Replica, ReplicaDrift, check_equal
from harness.fsdp.tensor_parallel.parameters import values_here
from harness.fsdp.tensor_parallel.portion import Portion, UnknownPlan


def check_plan(module: nn.Module, groups: Groups, tensor: dist.ProcessGroup | None) -> None:
    """Refuse parameters that are cut in a way that no tensor-parallel axis beside the data-parallel ones explains.

    Args:
        groups: data-parallel ranks. tensor: ranks of the tensor-parallel axis; None without one.

    Raises:
        UnknownPlan: a ValueError.
    """
    for name, param in module.named_parameters():
        Portion.of(name, param, tensor)
        if tensor is not None and tensor.size() > 1 and getattr(param, "sequence_parallel", False):
            _refuse_terms(name, param)
    ranks = set() if tensor is None else set(dist.get_process_group_ranks(tensor))
    for axis, group in (("dp_shard_dim", groups.inner or dist.group.WORLD), ("dp_outer_dim", groups.outer)):
        both = set() if group is None else ranks & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise UnknownPlan(
                f"ranks {sorted(both)} are on the tensor-parallel axis and on the sharding one ({axis}) at once: make a"
                " mesh of both, init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), cut over mesh['tp'],"
                " and give device_mesh=mesh, dp_shard_dim='dp', tp_dim='tp'"
            )


def _refuse_terms(name: str, param: nn.Parameter) -> None:
    """Refuse a plain parameter whose gradient on each rank of the axis is a term of a sum, as Megatron's mark says;
    that of a DTensor says so itself."""
    if not isinstance(param, DTensor):
        raise UnknownPlan(
            f"parameter {name} has sequence_parallel=True: each tensor-parallel rank makes a term of its gradient, and"
            " nobody adds up those of a plain tensor. Cut the module by torch's SequenceParallel(), whose parameters"
            " are DTensors; or take the mark away where every rank sees all positions"
        )


def check_copies(module: nn.Module, tensor: Communicator | None) -> None:
    """Refuse a parameter that no plan cuts and that is not alike on the ranks of the axis: what cuts it then says
    nothing of it, or each rank has made up values of its own. *Collective.*

    Raises:
        UnknownPlan: a ValueError, on all ranks of the axis.
    """
    if tensor is None:
        return
    copied = [(n, p) for n, p in module.named_parameters() if Portion.of(n, p, tensor.group).is_copied]
    try:
        check_equal([Replica(name, values_here(p)) for name, p in copied], tensor, "before sharding")
    except ReplicaDrift as error:
        raise UnknownPlan(
            f"{error}. Every tensor-parallel rank must begin with the same values of what is not cut: seed them alike."
            " What a module cuts by itself must say so: a DTensor, or the marks tensor_model_parallel and partition_dim"
        ) from None
