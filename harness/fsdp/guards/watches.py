"""The watchdog of one model: the one module of the engine that knows `harness.watchdog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import abort_beside
from harness.fsdp.comm.device import DeviceRuntime
from harness.watchdog import CollectiveError as CollectiveError
from harness.watchdog import Watchdog, abort_group, default_timeout_s
from harness.watchdog import by_value as by_value
from harness.watchdog import ranks_text as ranks_text


class Watches:
    """A watchdog that observes the engine's collectives until `close`; None for a model of one rank."""

    def __init__(self, watchdog: Watchdog | None) -> None:
        self.watchdog = watchdog
        self._end: Callable[[], None] = (lambda: None) if watchdog is None else events.watch(watchdog)

    @property
    def is_over(self) -> bool:
        """True once the alarm is over: the groups are of no use any more."""
        return self.watchdog is not None and self.watchdog.is_over

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        if self.watchdog is not None:
            self.watchdog.close()
        self._end()


def watch_groups(
    groups: Sequence[dist.ProcessGroup],
    runtime: DeviceRuntime,
    timeout_s: float | None,
    check: bool,
    where: Callable[[], str],
) -> Watches:
    """The first group has all ranks of the model. timeout_s: None is the groups' own timeout, less a margin.

    Raises:
        ValueError: the limit is not positive.
    """
    if groups[0].size() == 1:
        return Watches(None)
    limit_s = default_timeout_s(groups, runtime.device) if timeout_s is None else timeout_s
    mark = runtime.record if runtime.has_streams else None
    watchdog = Watchdog(groups, limit_s, where=where, abort=_abort, mark=mark, records=False, check=check)
    return Watches(watchdog)


def _abort(group: dist.ProcessGroup) -> None:
    abort_beside(group)
    abort_group(group)
