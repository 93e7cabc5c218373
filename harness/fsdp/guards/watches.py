"""The watchdog of one model: the one module of the engine that knows `harness.watchdog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime
from harness.shm import ShmGroup
from harness.watchdog import (
    CollectiveError as CollectiveError,
    Watchdog,
    abort_group,
    by_value as by_value,
    default_timeout_s,
    ranks_text as ranks_text,
)


class ModelWatchdog(Watchdog, events.Observer):  # type: ignore[misc] # both have a `waiting`, to the same end
    """Told by the engine what its collectives and waits are."""


def watch_groups(
    groups: Sequence[dist.ProcessGroup],
    runtime: DeviceRuntime,
    timeout_s: float | None,
    check: bool,
    where: Callable[[], str],
    shared: Sequence[ShmGroup],
) -> ModelWatchdog | None:
    """A watchdog that observes the engine's collectives until `end_watch`; None for a model of one rank.

    groups: the first has all ranks of the model. timeout_s: None is the groups' own timeout, less a margin. shared:
    groups beside these, which are aborted with them. Raises ValueError: the limit is not positive.
    """
    if groups[0].size() == 1:
        return None
    limit_s = default_timeout_s(groups, runtime.device) if timeout_s is None else timeout_s
    mark = runtime.record if runtime.has_streams else None
    beside = WeakSet(shared)

    def abort(group: dist.ProcessGroup) -> None:
        for each in beside:
            each.abort()
        abort_group(group)

    watchdog = ModelWatchdog(groups, limit_s, where=where, abort=abort, mark=mark, records=False, check=check)
    watchdog.attach()
    return watchdog


def end_watch(watchdog: ModelWatchdog | None) -> None:
    if watchdog is not None:
        watchdog.close()
        watchdog.detach()
