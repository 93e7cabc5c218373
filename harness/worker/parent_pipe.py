"""A rank ends with its launcher, and with it all of its children, wherever it is stuck."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Mapping

from harness.store.rank_place import PARENT_PIPE


def hold_on(environment: Mapping[str, str]) -> None:
    """Tie this process group to the launcher at the other end of a pipe; no-op without one.

    Nothing is written to the pipe: it becomes readable when the launcher ends. On Linux the kernel kills the group too,
    even where the interpreter lock is held; elsewhere, or if the launcher was gone before, a thread does it.
    """
    if PARENT_PIPE not in environment:
        return
    parent_pipe = int(environment[PARENT_PIPE])
    os.set_inheritable(parent_pipe, False)
    if sys.platform == "linux":
        fcntl.fcntl(parent_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_die_when_closed, args=(parent_pipe,), name="parent_pipe", daemon=True).start()


def _die_when_closed(parent_pipe: int) -> None:
    os.read(parent_pipe, 1)
    os.killpg(0, signal.SIGKILL)
