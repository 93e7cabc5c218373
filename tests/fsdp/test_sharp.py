"""Who owns InfiniBand SHARP: when the variable is on, and that communicators exist at once."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import axis_groups, with_sharp
from harness.fsdp.comm import mesh
from harness.fsdp.comm.mesh import COLLNET, group_of_members
from tests.support.spawn import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("before", [{}, {COLLNET: "0"}, {COLLNET: "1", "OTHER": "x"}])
def test_the_variable_is_on_while_the_owner_is_created_and_only_then(
    before: dict[str, str], group_of_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(mesh, "barrier", lambda group, device: seen.append(os.environ.get(COLLNET)))
    monkeypatch.setattr(os, "environ", environment := dict(before))
    with pytest.raises(KeyError):
        with_sharp(lambda: {}["no group"], CUDA)
    assert environment == before
    assert with_sharp(lambda: group_of_one, CUDA) is group_of_one
    with_sharp(lambda: group_of_one, CPU)
    assert seen == ["1", before.get(COLLNET)], "nothing is set without NCCL"
    assert environment == before


def _axes(rank: int, num_outer: int, owner: str) -> tuple[list[int], list[int], list[tuple[str, str | None]]]:
    os.environ[COLLNET] = "0"
    created: list[tuple[str, str | None]] = []
    make = mesh._own_group

    def noting(groups: list[list[int]], name: str) -> dist.ProcessGroup:
        created.append((name, os.environ.get(COLLNET)))
        return make(groups, name)

    mesh._own_group = noting
    barrier, mesh.barrier = mesh.barrier, lambda group, device: barrier(group, CPU)
    inner, outer = axis_groups(num_outer, CUDA, owner)
    return dist.get_process_group_ranks(inner), dist.get_process_group_ranks(outer), created


@pytest.mark.parametrize("owner", ["dp", "dp_outer"])
def test_the_owners_axis_is_created_first_and_alone_with_sharp(owner: str) -> None:
    other = "dp" if owner == "dp_outer" else "dp_outer"
    for rank, (inner, outer, created) in enumerate(run_ranks(_axes, 4, 2, owner)):
        assert inner == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert outer == [rank % 2, rank % 2 + 2]
        assert created == [(owner, "1"), (other, "0")]


# -- groups that a part of all ranks makes by itself, while the others do something else -------------------------------


def of_two(rank: int) -> tuple[list[Any], bool, float]:
    """What torch would split off, while ranks 0 and 2 of three make a group; whether the default is bound afterwards;
    and the group's sum."""
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = CUDA  # as init_process_group(device_id=...) does
    right, split = dist.distributed_c10d._get_split_source, list[Any]()

    def watched(group: dist.ProcessGroup) -> Any:
        split.append(group)
        return right(group)

    total = torch.ones(1)
    with mock.patch.object(dist.distributed_c10d, "_get_split_source", watched):
        if rank != 1:  # which never comes
            group = group_of_members([0, 2], "of two")
            dist.all_reduce(total, group=group)
    return split, default.bound_device_id == CUDA, total.item()


def test_a_part_is_not_split_off_a_communicator_of_all() -> None:
    assert run_ranks(of_two, 3) == [([], True, 2.0), ([], True, 1.0), ([], True, 2.0)]
