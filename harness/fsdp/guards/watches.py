"""What watches the collectives of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.guards.collective_check import CollectiveCheck
from harness.fsdp.guards.watchdog import Watchdog
from harness.fsdp.members import timeout_of

MARGIN_S = 30.0
"""Seconds, a tenth of the timeout at most, that ranks have to agree on a message before the backend gives up."""


class Watches:
    """What watches one model's collectives; `close` ends it."""

    def __init__(self, watching: Sequence[Watchdog | CollectiveCheck]) -> None:
        self.watching = watching

    @property
    def is_over(self) -> bool:
        """Whether a watchdog has raised its alarm: the groups are of no use any more."""
        return any(isinstance(each, Watchdog) and each.is_over for each in self.watching)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        for each in self.watching:
            each.close()


def watch_groups(
    groups: Sequence[dist.ProcessGroup],
    runtime: DeviceRuntime,
    timeout_s: float | None,
    check: bool,
    where: Callable[[], str],
) -> Watches:
    """Watch a model of several ranks, and what else is asked for; see `Watchdog` and `CollectiveCheck`. The first group
    has all ranks of the model.

    Raises:
        ValueError: the limit is not positive.
    """
    watching: list[Watchdog | CollectiveCheck] = []
    if groups[0].size() > 1:
        limit_s = usual_limit_s(groups, runtime.device) if timeout_s is None else timeout_s
        watching.append(Watchdog(groups, runtime, limit_s, where))
        watching += [CollectiveCheck(groups[0], limit_s)] if check else []
    return Watches(watching)


def usual_limit_s(groups: Sequence[dist.ProcessGroup], device: torch.device) -> float:
    """Seconds a wait may last where nobody said so: the groups' own timeout, the shortest of them, less a margin. So a
    rank that works alone for long is ended no sooner than torch would end it, and the message names ranks."""
    given = min(timeout_of(group, device).total_seconds() for group in groups)
    return given - min(MARGIN_S, given / 10)
