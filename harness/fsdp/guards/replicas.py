"""Data that several ranks hold alike: weights, compared every few steps; and modules, settings and plans, compared
before anything is changed.

Words of 32, 16 or 8 bits are mixed with their index, not linearly, so that changes do not cancel, and added modulo
2^64: a sum of integers has no order, so any kernel gives the same hash.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Groups, Meshes, all_values, everyones
from harness.fsdp.guards.watches import by_value, ranks_text
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import REPLICATE
from harness.fsdp.tensor_parallel import TpShard, UnknownPlan, values_here

HASHES = "replica hashes"
BLOCK = 1 << 16  # words hashed at a time on a CPU: they stay in cache
DEVICE_BLOCK = 1 << 24  # 128 MiB
_ODD_1, _ODD_2 = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # of splitmix64, made positive


@dataclass(frozen=True)
class Replica:
    """A flat tensor that must have the same bits on all ranks of a group. parts: views of it by name, in one order."""

    name: str
    tensor: Tensor
    parts: Sequence[tuple[str, Tensor]] = ()


class ReplicaDrift(RuntimeError):
    """Copies on several ranks have other bits."""


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """int64, shape [], on the tensor's device."""
    flat = tensor.detach().contiguous().reshape(-1)
    word = torch.int32 if flat.nbytes % 4 == 0 else torch.int16 if flat.nbytes % 2 == 0 else torch.uint8
    words = flat.view(torch.uint8).view(word)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = DEVICE_BLOCK if is_queued(flat.device) else BLOCK
    ramp = torch.arange(1, min(size, words.numel()) + 1, dtype=torch.int64, device=flat.device)
    for begin in range(0, words.numel(), size):
        block = words[begin : begin + size].to(torch.int64)
        mixed = (ramp[: block.numel()] + begin).mul_(_ODD_1).bitwise_xor_(block)
        mixed.mul_(_ODD_2)
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD_1)
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum()
    return total


def check_equal(replicas: Sequence[Replica], comm: Communicator, when: str) -> None:
    """Compare tensors over a group: the same names, lengths and dtypes everywhere. *Collective.* One number a tensor.
    Raises ReplicaDrift: on all ranks the same, naming the first tensor that differs, its part, and the ranks."""
    if comm.size == 1 or not replicas:
        return
    table = all_values(comm, torch.stack([bit_hash(each.tensor) for each in replicas]), HASHES)
    if not (differing := _differing(table)):
        return
    replica = replicas[differing[0]]
    hashes, name = table[:, differing[0]], "padding between parameters"
    if replica.parts:
        of_parts = all_values(comm, torch.stack([bit_hash(view) for _, view in replica.parts]), HASHES)
        if places := _differing(of_parts):
            hashes, name = of_parts[:, places[0]], replica.parts[places[0]][0]
    sides = sorted(by_value(dict(enumerate(map(str, hashes.tolist())))).values(), key=len, reverse=True)
    raise ReplicaDrift(
        f"replicas differ {when}: {name} of bucket {replica.name} has other bits on"
        f" {ranks_text(sorted(rank for side in sides[1:] for rank in side))} than on {ranks_text(sides[0])}. Something"
        " changed weights on some ranks only: an edit, another learning rate, or other arithmetic"
    )


def _differing(table: Tensor) -> list[int]:
    differs: list[bool] = (table != table[0]).any(0).tolist()
    return [place for place, each in enumerate(differs) if each]


def held_by_several(buckets: Sequence[ParamGroup], meshes: Meshes) -> list[tuple[Communicator, list[Replica]]]:
    """Copies: unsharded compute weights on all ranks; main weights, and inner shards of compute weights, on the axis
    that does not split them; on a tensor-parallel axis parameters that no plan cuts."""
    found: list[tuple[Communicator, list[Replica]]] = []
    for mesh in meshes:
        held = [bucket for bucket in buckets if bucket.mesh is mesh]
        whole = [Replica(b.name, b.compute, b.named_slices(b.compute)) for b in held if b.is_resident]
        own = [
            (b.cuts.own, Replica(f"{b.name} main weights", b.main_storage, b.cuts.own_rows(b.main_shards)))
            for b in held
            if b.main_storage is not None
        ]
        found += [(mesh.everyone, whole), (mesh.inner, [each for cut, each in own if cut.inner is REPLICATE])]
        if mesh.outer is not None:
            kept = ((b.name, b.kept) for b in held if not b.is_resident)
            shards = [Replica(f"{name} inner shard", shard) for name, shard in kept if shard is not None]
            found.append((mesh.outer, [each for cut, each in own if cut.outer is REPLICATE] + shards))
    if meshes.tensor is not None:
        found.append((meshes.tensor, [each for bucket in buckets for each in _copies(bucket)]))
    return found


def _copies(bucket: ParamGroup) -> list[Replica]:
    rows = bucket.cuts.own_rows(bucket.main_shards)
    copied = ((name, part) for name, part in rows if bucket.tp_shards[name].is_copied)
    return [Replica(f"{bucket.name} main weights", part, [(name, part)]) for name, part in copied]


class CopiesPart(RuntimeError):
    """Tensor-parallel ranks see other data."""


Pairs = Sequence[tuple[str, str]]  # pairs of a subject ("parameter blocks.0.weight") and its value on this rank


# -- agreement before anything is changed ------------------------------------------------------------------------------


class RanksDisagree(RuntimeError):
    """Raised by all ranks with the same message."""


def check_agreed(pairs: Pairs, comm: Communicator, purpose: str, wrong: str, fix: str) -> None:
    """Compare one number a rank; only where it differs, all pairs. *Collective* over `comm`.

    pairs: this rank's pairs. purpose: for labels. wrong, fix: the message around the first difference. Raises
    RanksDisagree: on all ranks, with the first name that differs and every rank's value.
    """
    if comm.size == 1:
        return
    number = zlib.crc32("\n".join(f"{name}\t{what}" for name, what in pairs).encode())
    if len(set(all_values(comm, torch.tensor(number, device=comm.runtime.device), purpose).tolist())) == 1:
        return
    said = [dict(each) for each in everyones(list(pairs), comm, purpose)]
    names = dict.fromkeys(name for each in said for name in each)
    differing = [name for name in names if len({each.get(name) for each in said}) > 1]
    text = "they come in another order"
    if differing:
        sides = by_value({rank: each.get(differing[0], "not there") for rank, each in enumerate(said)})
        text = f"{differing[0]} is " + ", ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in sides.items())
    raise RanksDisagree(f"{wrong}: {text}. {fix}")


def check_plan(module: nn.Module, groups: Groups, tensor: dist.ProcessGroup | None) -> None:
    """Raise UnknownPlan for parameters that no tensor-parallel axis beside the data-parallel ones explains."""
    for name, param in module.named_parameters():
        TpShard.of(name, param, tensor)
        is_term = getattr(param, "sequence_parallel", False) and not isinstance(param, DTensor)
        if tensor is not None and tensor.size() > 1 and is_term:
            raise UnknownPlan(
                f"parameter {name} has sequence_parallel=True, and nobody adds up the gradients of a plain tensor: cut"
                " by torch's SequenceParallel(), or take the mark away where every rank sees all positions"
            )
    ranks = set() if tensor is None else set(dist.get_process_group_ranks(tensor))
    for axis, group in (("dp_shard_dim", groups.inner or dist.group.WORLD), ("dp_outer_dim", groups.outer)):
        both = set() if group is None else ranks & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise UnknownPlan(
                f"ranks {sorted(both)} are on the tensor-parallel axis and on the sharding one ({axis}) at once: give"
                " device_mesh=mesh, dp_shard_dim='dp', tp_dim='tp' of a mesh with mesh_dim_names=('dp', 'tp')"
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
