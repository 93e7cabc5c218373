"""A rank that its launcher started dies with it, whatever the rank is stuck in."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping

from harness.store.placement import LEASH

PR_SET_PDEATHSIG = 1


def hold_on(environment: Mapping[str, str]) -> None:
    """Tie this process to the launcher at the other end of the leash; without a leash, do nothing.

    Two ties: a thread that reads the leash kills this rank's whole process group when the pipe closes, and on Linux the
    kernel kills the rank itself, so that code which never lets go of the interpreter lock dies too.
    """
    if LEASH not in environment:
        return
    descriptor = int(environment[LEASH])
    os.set_inheritable(descriptor, False)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_die_when_closed, args=(descriptor,), name="leash", daemon=True).start()


def _die_when_closed(descriptor: int) -> None:
    while os.read(descriptor, 1):  # nothing is ever written: the read ends when the last writer is gone
        pass
    os.killpg(0, signal.SIGKILL)
