"""One rank in this process, so that a debugger, a profiler or a print works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

from harness.config.rank_environment import run_environment
from harness.launch.local.run import EXIT_CODES, Ended
from harness.launch.opening import Opened
from harness.store import status
from harness.store.files import Lock
from harness.store.rank_place import RankPlace, stop_reason
from harness.store.screen import unfiltered
from harness.store.status import State

STATES = {code: state for state, code in EXIT_CODES.items()}


def run_inline(opened: Opened, lock: Lock, listener: Callable[[dict[str, Any]], None]) -> Ended:
    """Run an opened attempt of one rank here. Owns `lock` from here on."""
    path, attempt = opened.run.path, opened.attempt
    place = RankPlace(rank=0, world_size=1, local_rank=0, start="", launcher="inline")
    os.environ.update(run_environment(opened.cell.typed, opened.run.attempt_dir(attempt)))
    with lock:
        try:
            # By name: only here does the front end's process become a rank, and no other front-end code may load torch.
            with unfiltered():
                code = import_module("harness.worker").main(path, attempt, place, listener)
        except KeyboardInterrupt:
            reason = f"{stop_reason(signal.SIGINT)}; not saved"
            status.move(path, attempt, State.cancelled, reason)
            return Ended(State.cancelled, reason)
        present = opened.run.status()
    return Ended(STATES[code], present.reason if present is not None else "")
