"""Groups over shared memory beside a program's own, which move the buckets of one model between ranks of one host."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.shm import ShmGroup

_BESIDE: WeakKeyDictionary[dist.ProcessGroup, WeakSet[ShmGroup]] = WeakKeyDictionary()


def beside(group: dist.ProcessGroup) -> ShmGroup:
    """A new group of the same ranks, with the same timeout; it is gone with whoever keeps it. *Collective.*"""
    with events.begin(Label("all_gather", "shared memory")):
        made = ShmGroup(group, group.rank(), group.size())
    _BESIDE.setdefault(group, WeakSet()).add(made)
    return made


def abort_beside(group: dist.ProcessGroup) -> None:
    """End all waits in the groups that were made beside this one."""
    for made in list(_BESIDE.get(group, ())):
        made.abort()
