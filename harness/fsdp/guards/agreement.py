"""Agreement of all ranks, before anything is changed: on modules, on settings, and on a plan of tensor parallelism."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Everyone, Groups, all_values
from harness.fsdp.guards.replicas import Replica, ReplicaDrift, check_equal
from harness.fsdp.guards.watches import by_value, ranks_text
from harness.fsdp.tensor_parallel import TpShard, UnknownPlan, values_here

Pairs = Sequence[tuple[str, str]]  # pairs of a subject ("parameter blocks.0.weight") and its value on this rank


class RanksDisagree(RuntimeError):
    """Raised by all ranks with the same message."""


def check_agreed(pairs: Pairs, comm: Everyone, purpose: str, wrong: str, fix: str) -> None:
    """Compare one number a rank; only where it differs, all pairs. *Collective* over `comm`.

    Args:
        pairs: this rank's pairs. purpose: for labels. wrong, fix: the message around the first difference.

    Raises:
        RanksDisagree: on all ranks, with the first name that differs and every rank's value.
    """
    if comm.size == 1:
        return
    number = zlib.crc32("\n".join(f"{name}\t{what}" for name, what in pairs).encode())
    if len(set(all_values(comm, torch.tensor(number, device=comm.runtime.device), purpose).tolist())) == 1:
        return
    raise RanksDisagree(f"{wrong}: {difference(_everyones(pairs, comm, purpose))}. {fix}")


def _everyones(pairs: Pairs, comm: Everyone, purpose: str) -> list[Pairs]:
    text = json.dumps(list(pairs)).encode()
    found = all_values(comm, torch.tensor(len(text), device=comm.runtime.device), purpose).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(8 * -(-max(found) // 8))), dtype=torch.int64)
    rows = all_values(comm, padded.to(comm.runtime.device), purpose).cpu().view(torch.uint8).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, found, strict=True)]


def difference(everyones: Sequence[Pairs]) -> str:
    said = [dict(each) for each in everyones]
    names = dict.fromkeys(name for each in said for name in each)
    differing = [name for name in names if len({each.get(name) for each in said}) > 1]
    if not differing:
        return "they come in another order"
    sides = by_value({rank: each.get(differing[0], "not there") for rank, each in enumerate(said)})
    text = ", ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in sides.items())
    more = f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"{differing[0]} is {text}{more}"


def check_plan(module: nn.Module, groups: Groups, tensor: dist.ProcessGroup | None) -> None:
    """Raise UnknownPlan for parameters that no tensor-parallel axis beside the data-parallel ones explains."""
    for name, param in module.named_parameters():
        TpShard.of(name, param, tensor)
        is_term = getattr(param, "sequence_parallel", False) and not isinstance(param, DTensor)
        if tensor is not None and tensor.size() > 1 and is_term:
            raise UnknownPlan(
                f"parameter {name} has sequence_parallel=True: each tensor-parallel rank makes a term of its gradient,"
                " and nobody adds up those of a plain tensor. Cut the module by torch's SequenceParallel(), whose"
                " parameters are DTensors; or take the mark away where every rank sees all positions"
            )
    ranks = set() if tensor is None else set(dist.get_process_group_ranks(tensor))
    for axis, group in (("dp_shard_dim", groups.inner or dist.group.WORLD), ("dp_outer_dim", groups.outer)):
        both = set() if group is None else ranks & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise UnknownPlan(
                f"ranks {sorted(both)} are on the tensor-parallel axis and on the sharding one ({axis}) at once: make a"
                " mesh of both, init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), cut over mesh['tp'],"
                " and give device_mesh=mesh, dp_shard_dim='dp', tp_dim='tp'"
            )


def check_copies(module: nn.Module, tensor: Communicator | None) -> None:
    """Raise UnknownPlan, on all ranks of the axis, where they have other values of a parameter that no plan cuts.
    *Collective.* Either what cuts it says nothing of it, or ranks were seeded differently."""
    if tensor is None:
        return
    copied = [(n, p) for n, p in module.named_parameters() if TpShard.of(n, p, tensor.group).is_copied]
    try:
        check_equal([Replica(name, values_here(p)) for name, p in copied], tensor, "before sharding")
    except ReplicaDrift as error:
        raise UnknownPlan(
            f"{error}. Every tensor-parallel rank must begin with the same values of what is not cut: seed them alike."
            " What a module cuts by itself must say so: a DTensor, or the marks tensor_model_parallel and partition_dim"
        ) from None
