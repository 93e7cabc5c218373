"""Which communicator owns InfiniBand SHARP: the switches give a job one tree, and the first to ask takes it.

NCCL reads NCCL_COLLNET_ENABLE anew for each communicator, and the variable overrides a communicator's own setting. So
it is 1 while the owner's communicator is created, at once and not at its first collective, and 0 for every other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from harness.private_torch import backends_of, timeout_of

COLLNET = "NCCL_COLLNET_ENABLE"


class SharpOwnership:
    """Gives InfiniBand SHARP to one communicator of this process, once; on CPU nothing is set."""

    def __init__(self, device: torch.device, environment: MutableMapping[str, str] = os.environ) -> None:
        self.device = device
        self.owner: str | None = None
        self._environment = environment

    def create(self, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        """Make the owner's group, and its communicator at once. *Collective*; ranks outside the group take no part.
        Raises RuntimeError: another communicator owns SHARP."""
        if self.owner is not None:
            raise RuntimeError(f"one communicator can own SHARP, and that of {self.owner} does")
        before = self._environment.get(COLLNET)
        if self.device.type == "cuda":
            self._environment[COLLNET] = "1"
        try:
            group = make()
            outsider: Any = dist.GroupMember.NON_GROUP_MEMBER  # what ranks outside a group get for it
            if group is not outsider:
                barrier(group, self.device)
        finally:
            self._environment.pop(COLLNET, None)
            if before is not None:
                self._environment[COLLNET] = before
        self.owner = getattr(group, "group_desc", "") or "its group"
        return group

    def axis_groups(self, num_outer: int, owner: str = "dp") -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Create this rank's process groups along the inner and the outer axis, the owner of SHARP first. *Collective.*

        Ranks of one inner group are neighbours: rank = outer index * inner size + inner index. RuntimeError: as
        `create`, or the size does not divide the ranks.

        Args:
            num_outer: size of the outer axis; it must divide the number of ranks.
            owner: "dp" (inner) or "dp_outer".
        """
        grid = torch.arange(dist.get_world_size()).view(num_outer, -1)
        ranks: dict[str, list[list[int]]] = {"dp": grid.tolist(), "dp_outer": grid.T.tolist()}
        owned = self.create(lambda: _own_group(ranks[owner], owner))
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
