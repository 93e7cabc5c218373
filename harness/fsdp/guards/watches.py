"""The watchdog of one model: the one module of the engine that knows `harness.watchdog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.options import Options
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


def watch_groups(comms: Sequence[Communicator], options: Options, where: Callable[[], str]) -> ModelWatchdog | None:
    """A watchdog that observes the engine's collectives until `end_watch`; None for a model of one rank.

    comms: the first has all ranks of the model; their shared memory is aborted with them. Raises ValueError: the limit
    is not positive.
    """
    if comms[0].size == 1:
        return None
    groups, runtime, limit_s = [comm.group for comm in comms], comms[0].runtime, options.watchdog_timeout_s
    if limit_s is None:
        limit_s = default_timeout_s(groups, runtime.device)
    mark = runtime.record if runtime.has_streams else None
    beside = WeakSet(comm.shm for comm in comms if comm.shm is not None)

    def abort(group: dist.ProcessGroup) -> None:
        for each in beside:
            each.abort()
        abort_group(group)

    check = options.check_collectives
    watchdog = ModelWatchdog(groups, limit_s, where=where, abort=abort, mark=mark, records=False, check=check)
    watchdog.attach()
    return watchdog


def end_watch(watchdog: ModelWatchdog | None) -> None:
    if watchdog is not None:
        watchdog.close()
        watchdog.detach()
