"""A rank that its launcher started dies with it, and with all it has started, whatever it is stuck in."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Mapping

from harness.store.rank_place import LEASH


def hold_on(environment: Mapping[str, str]) -> None:
    """Tie this process group to the launcher at the other end of the leash; without a leash, do nothing.

    The leash is a pipe nothing is ever written to: it becomes readable when the launcher is gone, however that died. On
    Linux the kernel is asked to kill the group then, so that code which never lets go of the interpreter lock dies too;
    elsewhere, and for a launcher that was gone before we asked, a thread does it.
    """
    if LEASH not in environment:
        return
    leash = int(environment[LEASH])
    os.set_inheritable(leash, False)
    if sys.platform == "linux":
        fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_die_when_closed, args=(leash,), name="leash", daemon=True).start()


def _die_when_closed(leash: int) -> None:
    os.read(leash, 1)
    os.killpg(0, signal.SIGKILL)
