"""What watches the collectives of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.guards.collective_check import CollectiveCheck
from harness.fsdp.guards.watchdog import Watchdog

USUAL_LIMIT_S = 300.0
"""Seconds a wait may last where nobody said how long."""


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
        limit_s = usual_limit_s(runtime.device) if timeout_s is None else timeout_s
        watching.append(Watchdog(groups, runtime, limit_s, where))
    if check:
        watching.append(CollectiveCheck(groups[0], timeout_s))
    return Watches(watching)


def usual_limit_s(device: torch.device) -> float:
    """Seconds a wait may last where nobody said so: nine tenths of what `init_process_group` was given, so that the
    backend does not give up first; `USUAL_LIMIT_S` where it was given nothing."""
    group = dist.distributed_c10d._get_default_group()
    given = group._get_backend(device).options._timeout
    defaults = (dist.constants.default_pg_timeout, dist.constants.default_pg_nccl_timeout)
    return USUAL_LIMIT_S if given in defaults else 0.9 * given.total_seconds()
