"""A store of all ranks of a group, for what must not go through the group itself."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

_USERS: defaultdict[str, count[int]] = defaultdict(count)
"""Numbers the users of each group's store in order of construction, which is the same on all its ranks."""


def stores_of(group: dist.ProcessGroup, timeout_s: float, clones: int) -> list[Any]:
    """Stores of all ranks of a group with the same keys, that nobody else uses, and a connection each.

    timeout_s: seconds that a wait for a key may last. Clones, as they do not wait for what another thread asks.
    """
    index = next(_USERS[group.group_name])
    # torch's annotations leave out what a store of a group is, and that it can be cloned
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    found = [store.clone() for _ in range(clones)]
    for each in found:
        each.set_timeout(timedelta(seconds=timeout_s))
    return [dist.distributed_c10d.PrefixStore(f"fsdp-watchdog/{index}", each) for each in found]
