"""The ranks of a model: an inner axis, an outer one, and everyone; and the same for expert parameters.

Gathers and reductions of the inner axis have a communicator each, unless one is asked for both: so neither waits for
the other on a device, and ranks that use different units may issue them in different orders. The outer axis has one of
its own: it is another group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.options import Options, Transport
from harness.private_torch import backends_of, timeout_of


def group_of_members(
    ranks: Sequence[int], description: str, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A group that its members alone make, others doing something else meanwhile. *Collective* among them.

    Where the default group is bound to a device, torch splits new ones off its communicator, for which NCCL needs all
    ranks of that (`ncclCommSplit`): members of a part would wait for ever. So a part is made from nothing.

    like: the group whose timeout it gets, which torch would not pass on; None is the default group.
    """
    default: Any = dist.group.WORLD
    bound, timeout = default.bound_device_id, timeout_of(*backends_of(like or default))
    if len(ranks) < default.size():
        default.bound_device_id = None
    try:
        made = dist.new_group(list(ranks), timeout, use_local_synchronization=True, group_desc=description)
        return cast(dist.ProcessGroup, made)
    finally:
        default.bound_device_id = bound


_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Kept for good: torch names groups by their ranks, and a second one of a name finds addresses of the first."""


def kept_group(beside: dist.ProcessGroup, ranks: tuple[int, ...] | None, description: str) -> dist.ProcessGroup:
    """A group of these ranks, or another one of the same ranks, made once. *Collective* among them."""
    members = ranks or tuple(dist.get_process_group_ranks(beside))
    made = _KEPT.setdefault(beside, {})
    if members not in made:
        made[members] = group_of_members(members, description, like=beside)
    return made[members]


@dataclass(frozen=True)
class Groups:
    """Process groups of one grid of ranks.

    inner: ranks that share a sharded copy; None: the default group. outer: ranks with the same place in their inner
    groups. everyone: all ranks, outer-major; required with `outer`. gather: a second group of `inner` for all-gathers.
    """

    inner: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    gather: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Place:
    inner_rank: int = 0
    inner_size: int = 1
    outer_rank: int = 0
    outer_size: int = 1


class Mesh:
    """Communicators of one grid of ranks. Raises ValueError: the groups do not form a grid.

    Args:
        transport: see `Communicator`.
        separate_gather: a communicator for gathers alone; None: yes.
    """

    def __init__(
        self,
        groups: Groups,
        runtime: DeviceRuntime,
        transport: Transport = Options.transport,
        separate_gather: bool | None = None,
    ) -> None:
        self.inner = Communicator(groups.inner, runtime, transport)
        gather = groups.gather
        if gather is None and separate_gather is not False and self.inner.size > 1:
            gather = (
                self.inner.group if self.inner.shm is not None else kept_group(self.inner.group, None, "fsdp_gather")
            )
        self.gather = self.inner if gather is None else Communicator(gather, runtime, transport)
        self.outer: Communicator | None = None
        self.everyone = self.inner
        if groups.outer is not None:
            self.outer = Communicator(groups.outer, runtime, transport)
            if groups.everyone is None:
                raise ValueError("an outer axis needs the group of all ranks too: give hybrid_fsdp_group")
            self.everyone = Communicator(groups.everyone, runtime, Transport.backend)
        self._check()
        outside = () if self.outer is None else (self.outer.rank, self.outer.size)
        self.place = Place(self.inner.rank, self.inner.size, *outside)

    def _check(self) -> None:
        ranks = [dist.get_process_group_ranks(each.group) for each in (self.inner, self.gather, self.everyone)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"the gather group has ranks {ranks[1]}, the sharding group {ranks[0]}: they must be equal"
            )
        if self.outer is None:
            return
        outer, size = dist.get_process_group_ranks(self.outer.group), self.inner.size
        rows = [ranks[2][begin : begin + size] for begin in range(0, len(ranks[2]), size)]
        is_grid = len(rows) == len(outer) and rows[self.outer.rank] == ranks[0]
        if not is_grid or [row[self.inner.rank] for row in rows] != outer:
            raise ValueError(
                f"dp_shard_dim (ranks {ranks[0]}) and dp_outer_dim (ranks {outer}) are no axes of one grid with the"
                f" ranks {ranks[2]} of hybrid_fsdp_group, whose inner groups must be neighbours, {len(outer)} x {size}"
            )

    @property
    def has_outer(self) -> bool:
        return self.outer is not None and self.outer.size > 1


def all_values(comm: Communicator, values: Tensor, purpose: str) -> Tensor:
    """Every rank's fp64 or int64 values: shape [ranks, *values.shape]. *Collective.*"""
    table = values.new_zeros(comm.size, *values.shape)
    table[comm.rank] = values
    return comm.sum_scalars(table, purpose)


def everyones(value: Any, comm: Communicator, purpose: str) -> list[Any]:
    """Every rank's value, as JSON has it. *Collective.*"""
    text = json.dumps(value).encode()
    found = all_values(comm, torch.tensor(len(text), device=comm.runtime.device), purpose).tolist()
    padded = torch.frombuffer(bytearray(text.ljust(8 * -(-max(found) // 8))), dtype=torch.int64)
    rows = all_values(comm, padded.to(comm.runtime.device), purpose).cpu().view(torch.uint8).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, found, strict=True)]


def crossed(data: Communicator, tensor: Communicator | None) -> Communicator:
    """All ranks of two axes, by number. *Collective* where both are there."""
    if tensor is None or tensor.size == 1:
        return data
    row = torch.tensor(dist.get_process_group_ranks(tensor.group), device=data.runtime.device)
    ranks = tuple(all_values(data, row, "ranks of both axes").flatten().tolist())
    group = kept_group(data.group, ranks, "fsdp_with_tensor")
    return Communicator(group, data.runtime, Transport.backend)


@dataclass(frozen=True)
class Meshes:
    dense: Mesh
    experts: Mesh
    tensor: Communicator | None = None

    @cached_property
    def everyone(self) -> Communicator:
        """All ranks of the model. *Collective* the first time."""
        return crossed(self.dense.everyone, self.tensor)

    def __iter__(self) -> Iterator[Mesh]:
        return iter([self.dense] if self.experts is self.dense else [self.dense, self.experts])

    @property
    def moving(self) -> dict[str, Communicator]:
        """Communicators that move buckets, by name; outer axes last."""
        marked = list(zip(("", "expert_"), self, strict=False))
        return (
            {f"{mark}dp": mesh.inner for mark, mesh in marked}
            | {f"{mark}dp_gather": mesh.gather for mark, mesh in marked if mesh.gather is not mesh.inner}
            | {f"{mark}dp_outer": mesh.outer for mark, mesh in marked if mesh.outer is not None}
        )

    @property
    def communicators(self) -> list[Communicator]:
        """Communicators of all axes, each once; of both axes of tensor-parallel ranks last."""
        found = [comm for mesh in self for comm in (mesh.everyone, mesh.inner, mesh.gather, mesh.outer)]
        found += [] if self.tensor is None else [self.tensor, self.everyone]
        return list(dict.fromkeys(filter(None, found)))

    def of(self, *, expert: bool) -> Mesh:
        return self.experts if expert else self.dense


# -- InfiniBand SHARP: the switches give a job one tree, and the first to ask takes it ---------------------------------

COLLNET = "NCCL_COLLNET_ENABLE"
"""NCCL reads it anew for each communicator, and it overrides a communicator's own setting. So it is 1 while the owner's
communicator is created, at once and not at its first collective, and 0 for every other."""


def with_sharp(make: Callable[[], dist.ProcessGroup], device: torch.device) -> dist.ProcessGroup:
    """Make the group that owns SHARP, one for each rank, and its communicator at once. *Collective.* On a CPU nothing
    is set."""
    before = os.environ.get(COLLNET)
    if device.type == "cuda":
        os.environ[COLLNET] = "1"
    try:
        group = make()
        barrier(group, device)
        return group
    finally:
        os.environ.pop(COLLNET, None)
        if before is not None:
            os.environ[COLLNET] = before


def axis_groups(num_outer: int, device: torch.device, owner: str = "dp") -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create this rank's process groups along the inner and the outer axis, the owner of SHARP first. *Collective.*

    Ranks of one inner group are neighbours: rank = outer index * inner size + inner index. RuntimeError: the size does
    not divide the ranks.

    Args:
        num_outer: size of the outer axis; it must divide the number of ranks.
        owner: "dp" (inner) or "dp_outer".
    """
    grid = torch.arange(dist.get_world_size()).view(num_outer, -1)
    ranks: dict[str, list[list[int]]] = {"dp": grid.tolist(), "dp_outer": grid.T.tolist()}
    owned = with_sharp(lambda: _own_group(ranks[owner], owner), device)
    made = {owner: owned} | {axis: _own_group(ranks[axis], axis) for axis in ranks if axis != owner}
    return made["dp"], made["dp_outer"]


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Meet the group's ranks by a collective on the device, which creates its communicator. *Collective.*"""
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    dist.all_reduce(flag, group=group)
    flag.item()  # the host waits: NCCL may read the variable on a thread of its own


def _own_group(groups: list[list[int]], name: str) -> dist.ProcessGroup:
    timeout = timeout_of(*backends_of(dist.group.WORLD))
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout, group_desc=name)
    return cast(dist.ProcessGroup, own)
