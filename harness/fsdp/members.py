"""Process groups that a part of all ranks makes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from harness.private_torch import backends_of
from harness.private_torch import timeout_of as timeout_of_backend


def group_of_members(
    ranks: Sequence[int], description: str, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A group that its members alone make, others doing something else meanwhile. *Collective* among them.

    Where the default group is bound to a device, torch splits new ones off its communicator, for which NCCL needs all
    ranks of that (`ncclCommSplit`): members of a part would wait for ever. So a part is made from nothing.

    Args:
        like: the group whose timeout it gets, which torch would not pass on; None is the default group.
    """
    default = dist.group.WORLD
    assert default is not None
    bound = default.bound_device_id
    if len(ranks) < default.size():
        default.bound_device_id = None
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout_of(like or default), use_local_synchronization=True, group_desc=description
        )
    finally:
        default.bound_device_id = bound
    return made


def timeout_of(group: dist.ProcessGroup, *devices: torch.device) -> timedelta:
    """How long a group's backend of these devices waits for a collective; of all it has, where none is given.

    Backends of other people's have no options: torch's default for gloo.
    """
    told = map(timeout_of_backend, backends_of(group, *devices))
    return min(filter(None, told), default=default_pg_timeout)
