"""Which communicator owns InfiniBand SHARP: the switches give a job one tree, and the first to ask takes it.

NCCL reads NCCL_COLLNET_ENABLE anew for each communicator, and the variable overrides a communicator's own setting. So
it is 1 while the owner's communicator is created, at once and not at its first collective, and 0 for every other.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from harness.private_torch import backends_of, timeout_of

COLLNET = "NCCL_COLLNET_ENABLE"


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
    own: dist.ProcessGroup
    assert dist.group.WORLD is not None
    timeout = timeout_of(*backends_of(dist.group.WORLD))
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout, group_desc=name)
    return own
