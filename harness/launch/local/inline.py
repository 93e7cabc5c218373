"""One rank in this very process, so that a debugger, a profiler or a print works as in any script."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from harness.config.rank_environment import run_environment
from harness.launch.local.run import Ended
from harness.launch.opening import Opened
from harness.store import status
from harness.store.files import Lock
from harness.store.rank_place import RankPlace
from harness.store.screen import unfiltered
from harness.store.status import State

STATES = {0: State.done, 1: State.failed, 75: State.preempted, 130: State.cancelled}


def run_inline(opened: Opened, lock: Lock, listener: Callable[[dict[str, Any]], None]) -> Ended:
    """Run an opened attempt of one rank here, and return its end. Owns `lock` from here on."""
    path, attempt = opened.run.path, opened.attempt
    place = RankPlace(rank=0, world_size=1, local_rank=0, start="", launcher="inline")
    os.environ.update(run_environment(opened.cell.typed, opened.run.attempt_dir(attempt)))
    with lock:
        try:
            # By name: only here does the desk's process become a rank, and no other desk code may load torch.
            with unfiltered():
                code = import_module("harness.worker").main(path, attempt, place, listener)
        except KeyboardInterrupt:
            status.move(path, attempt, State.cancelled, "interrupted by Ctrl-C")
            return Ended(State.cancelled, "interrupted by Ctrl-C")
        present = opened.run.status()
    return Ended(STATES[code], present.reason if present is not None else "")
