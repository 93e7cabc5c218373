"""Groups that a part of all ranks makes by itself, while the others do something else."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.fsdp.comm.mesh import group_of_members
from tests.support.spawn import run_ranks

GPU = torch.device("cuda", 0)


def of_two(rank: int) -> tuple[list[Any], bool, float]:
    """What torch would split off, while ranks 0 and 2 of three make a group; whether the default is bound afterwards;
    and the group's sum."""
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = GPU  # as init_process_group(device_id=...) does
    right, split = dist.distributed_c10d._get_split_source, list[Any]()

    def watched(group: dist.ProcessGroup) -> Any:
        split.append(group)
        return right(group)

    total = torch.ones(1)
    with mock.patch.object(dist.distributed_c10d, "_get_split_source", watched):
        if rank != 1:  # which never comes
            group = group_of_members([0, 2], "of two")
            dist.all_reduce(total, group=group)
    return split, default.bound_device_id == GPU, total.item()


def test_a_part_is_not_split_off_a_communicator_of_all() -> None:
    assert run_ranks(of_two, 3) == [([], True, 2.0), ([], True, 1.0), ([], True, 2.0)]
