"""Which communicator owns InfiniBand SHARP: the switches give a job one tree, and the first to ask takes it.

NCCL reads NCCL_COLLNET_ENABLE anew for each communicator, and the variable overrides a communicator's own setting. So
it is 1 while the owner's communicator is created, at once and not at its first collective, and 0 for every other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.private_torch import backends_of, timeout_of

COLLNET = "NCCL_COLLNET_ENABLE"

CTA_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}

Connect = Callable[[dist.ProcessGroup], dist.ProcessGroup]
"""Creates a group's communicator at once, and returns the group. *Collective.*"""


class SharpOwnership:
    """Gives InfiniBand SHARP to one communicator of this process, once; on CPU nothing is set."""

    def __init__(self, device: torch.device, environment: MutableMapping[str, str] = os.environ) -> None:
        self.device = device
        self.owner: str | None = None
        self._environment = environment

    @contextmanager
    def creating(self) -> Iterator[Connect]:
        """Context in which the owner's group is created; its function must be called with that group.

            with ownership.creating() as connect:
                group = connect(dist.new_group(ranks, pg_options=communicator_options(owns_sharp=True)))

        Raises:
            RuntimeError: another communicator owns SHARP, or no group was connected.
        """
        if self.owner is not None:
            raise RuntimeError(f"one communicator can own SHARP, and that of {self.owner} does")
        connected: list[dist.ProcessGroup] = []

        def connect(group: dist.ProcessGroup) -> dist.ProcessGroup:
            if connected:
                raise RuntimeError("one communicator can own SHARP; call connect once")
            outsider: Any = dist.GroupMember.NON_GROUP_MEMBER  # what ranks outside a group get for it
            if group is not outsider:
                barrier(group, self.device)
            connected.append(group)
            return group

        with variable(self._environment, COLLNET, "1") if self.device.type == "cuda" else nullcontext():
            yield connect
        if not connected:
            raise RuntimeError(
                "no group was connected: call what `creating` yields with the group that is to own SHARP"
            )
        self.owner = getattr(connected[0], "group_desc", "") or "its group"

    def axis_groups(self, num_outer: int, owner: str = "dp") -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Create this rank's process groups along the inner and the outer axis, the owner of SHARP first. *Collective.*

        Ranks of one inner group are neighbours: rank = outer index * inner size + inner index.

        Args:
            num_outer: size of the outer axis; it must divide the number of ranks.
            owner: "dp" (inner) or "dp_outer".

        Raises:
            ValueError: the size does not divide the ranks, or there is no such axis.
            RuntimeError: as `creating`.
        """
        world = dist.get_world_size()
        if num_outer < 1 or world % num_outer:
            raise ValueError(f"num_outer={num_outer} does not divide the number of ranks, {world}")
        if owner not in ("dp", "dp_outer"):
            raise ValueError(f"owner={owner!r} is not one of dp, dp_outer")
        num_inner = world // num_outer
        ranks = {
            "dp": [[outer * num_inner + inner for inner in range(num_inner)] for outer in range(num_outer)],
            "dp_outer": [[outer * num_inner + inner for outer in range(num_outer)] for inner in range(num_inner)],
        }
        with self.creating() as connect:
            owned = connect(_own_group(ranks[owner], owner))
        made = {owner: owned} | {axis: _own_group(ranks[axis], axis) for axis in ranks if axis != owner}
        return made["dp"], made["dp_outer"]


@contextmanager
def variable(environment: MutableMapping[str, str], name: str, value: str) -> Iterator[None]:
    before = environment.get(name)
    environment[name] = value
    try:
        yield
    finally:
        if before is None:
            environment.pop(name, None)
        else:
            environment[name] = before


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Meet the group's ranks by a collective on the device, which creates its communicator. *Collective.*"""
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    dist.all_reduce(flag, group=group)
    flag.item()  # the host waits: NCCL may read the variable on a thread of its own


@dataclass(frozen=True)
class ThreadBlocks:
    """Limits on the thread blocks of one communicator's collectives; None: NCCL chooses.

    policy: default, efficiency (NCCL 2.27) or zero (NCCL 2.28). nvlink: over NVLink SHARP (NCCL 2.27).
    """

    policy: str = "default"
    fewest: int | None = None
    most: int | None = None
    nvlink: int | None = None


def communicator_options(
    limits: ThreadBlocks | None = None, *, owns_sharp: bool | None = None, options: Any = None
) -> tuple[Any, list[str]]:
    """Options of one NCCL communicator, and the names of those that torch cannot set here (use the environment).

    Args:
        limits: limits on thread blocks.
        owns_sharp: whether CollNet is on; None: the environment decides.
        options: options to complete; None: new options of torch, which needs torch built with NCCL.

    Raises:
        ValueError: an unknown policy, or the fewest blocks are more than the most.
        RuntimeError: torch was built without NCCL, and no options were given.
    """
    limits = limits or ThreadBlocks()
    if limits.policy not in CTA_POLICIES:
        raise ValueError(f"policy={limits.policy!r} is not one of {', '.join(CTA_POLICIES)}")
    if limits.fewest is not None and limits.most is not None and limits.fewest > limits.most:
        raise ValueError(f"fewest={limits.fewest} is more than most={limits.most}")
    if options is None:
        made_by = getattr(dist, "ProcessGroupNCCL", None)
        if made_by is None:
            raise RuntimeError("this torch was built without NCCL; there are no communicator options")
        options = made_by.Options()
    wanted = {
        "cta_policy": None if limits.policy == "default" else CTA_POLICIES[limits.policy],
        "min_ctas": limits.fewest,
        "max_ctas": limits.most,
        "nvls_ctas": limits.nvlink,
        "collnet_enable": None if owns_sharp is None else int(owns_sharp),
    }
    lacking = []
    for name, value in wanted.items():
        if value is None:
            continue
        if hasattr(options.config, name):
            setattr(options.config, name, value)
        else:
            lacking.append(name)
    return options, lacking


def _own_group(groups: list[list[int]], name: str) -> dist.ProcessGroup:
    own: dist.ProcessGroup
    assert dist.group.WORLD is not None
    timeout = timeout_of(*backends_of(dist.group.WORLD))
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout, group_desc=name)
    return own
