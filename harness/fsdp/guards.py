"""Guards of a model: its watchdog; gradients that are not finite; data that several ranks hold alike.

Weights are compared every few steps; modules, settings and plans before anything is changed.

Words of 32, 16 or 8 bits are mixed with their index, not linearly, so that changes do not cancel, and added modulo
2^64: a sum of integers has no order, so any kernel gives the same hash.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Groups, Meshes, all_values, everyones
from harness.fsdp.options import Options
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import REPLICATE
from harness.fsdp.tensor_parallel import TpShard, UnknownPlan, values_here
from harness.watchdog import (
    CollectiveError as CollectiveError,
    Watchdog,
    abort_group,
    by_value,
    default_timeout_s,
    ranks_text,
)


class ModelWatchdog(Watchdog, events.Observer):  # type: ignore[misc] # both have a `waiting`, to the same end
    """Told by the engine what its collectives and waits are."""


def watch_groups(comms: Sequence[Communicator], options: Options, where: Callable[[], str]) -> ModelWatchdog | None:
    """A watchdog that observes the engine's collectives until `end_watch`; None for a model of one rank.

    comms: the first has all ranks of the model; their shared memory is aborted with them. Raises ValueError: the limit
    is not positive.
    """
    if comms[0].size == 1:
        return None
    groups, runtime = [comm.group for comm in comms], comms[0].runtime
    limit_s = options.watchdog_timeout_s or default_timeout_s(groups, runtime.device)
    mark = runtime.record if runtime.has_streams else None
    beside = WeakSet(comm.shm for comm in comms if comm.shm is not None)

    def abort(group: dist.ProcessGroup) -> None:
        for each in beside:
            each.abort()
        abort_group(group)

    watchdog = ModelWatchdog(
        groups, limit_s, where=where, abort=abort, mark=mark, records=False, check=options.check_collectives
    )
    watchdog.attach()
    return watchdog


def end_watch(watchdog: ModelWatchdog | None) -> None:
    if watchdog is not None:
        watchdog.close()
        watchdog.detach()


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
    return (table != table[0]).any(0).nonzero().flatten().tolist()


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
        rows = ((b, *row) for b in buckets for row in b.cuts.own_rows(b.main_shards))
        copied = ((b.name, name, part) for b, name, part in rows if b.tp_shards[name].is_copied)
        found.append((meshes.tensor, [Replica(f"{of} main weights", part, [(n, part)]) for of, n, part in copied]))
    return found


class CopiesPart(RuntimeError):
    """Tensor-parallel ranks see other data."""


class RanksDisagree(RuntimeError):
    """Raised by all ranks with the same message."""


def check_agreed(pairs: Sequence[tuple[str, str]], comm: Communicator, purpose: str, wrong: str, fix: str) -> None:
    """Compare one number a rank; only where it differs, all pairs. *Collective* over `comm`.

    pairs: of a subject ("parameter blocks.0.weight") and its value on this rank. purpose: for labels. wrong, fix: the
    message around the first difference. Raises RanksDisagree: on all ranks, with the first name that differs and every
    rank's value.
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


PURPOSE = "non-finite gradients"


class GradientGuard:
    """Gradients that are not finite, reported by all ranks at the end of a step.

    A rank that raised in the middle of a backward would leave the others waiting in their collectives: one small
    all-reduce tells every rank, and all raise one error. A bucket is looked at once a backward: right before it is
    sent, in the wire's dtype, or else at the end of the backward. The host reads one number, and the rest only if that
    is not zero.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # of each bucket in each backward: microbatch, names and numbers of elements, and the largest element of each
        self._seen: list[tuple[int, list[tuple[str, int]], Tensor]] = []

    def forget(self) -> None:
        self._seen = []

    @torch.no_grad()
    def look(self, bucket: ParamGroup, gradients: Tensor, microbatch: int) -> None:
        """Look at an unsharded bucket of unreduced gradients, any floating-point dtype. microbatch: counts from 1."""
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        if held:
            largest = torch.stack([torch.linalg.vector_norm(view, math.inf) for _, view in held])
            self._seen.append((microbatch, [(name, view.numel()) for name, view in held], largest))

    def report(self) -> None:
        """Raise the same FloatingPointError on all ranks if any of them found something. *Collective.*"""
        found = torch.zeros(1, dtype=torch.int64, device=self.comm.runtime.device)
        for _, _, largest in self._seen:
            found += largest.isfinite().logical_not_().sum()
        if not int(self.comm.sum_scalars(found, PURPOSE)):
            return
        first = min(filter(None, everyones(self._first(), self.comm, PURPOSE)))
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {first[-1]}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _first(self) -> tuple[int, int, str] | None:
        """Microbatch, rank and description of this rank's first bad bucket.

        Of its parameters the last one: the backward reached it first.
        """
        for microbatch, params, largest in self._seen:
            for (name, numel), value in zip(reversed(params), reversed(largest.tolist()), strict=True):
                if not math.isfinite(value):
                    kind = "NaN" if math.isnan(value) else "Inf"
                    where = f"{name} on rank {self.comm.rank} in microbatch {microbatch}"
                    return microbatch, self.comm.rank, f"{where}: {kind} among {numel} elements"
        return None
