"""Process groups that a part of all ranks makes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from harness.private_torch import backends_of, timeout_of


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
    bound, timeout = default.bound_device_id, timeout_of(*backends_of(like or default))
    if len(ranks) < default.size():
        default.bound_device_id = None
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, use_local_synchronization=True, group_desc=description
        )
    finally:
        default.bound_device_id = bound
    return made
