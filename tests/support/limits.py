"""The last resort against a test that never ends: its process does.

pytest-timeout raises in the main thread, at its next instruction of Python. A thread that waits in C has none, and an
exception raised in a callback is lost. What is armed here needs neither: it prints where every thread is and ends the
process, which `pytest -n` reports as a failure of that test, and goes on with a new worker.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 60.0
"""For pytest-timeout to have raised, and for fixtures to have ended, before the process is."""
LONGEST_WAIT_S = 1800.0
"""For a test that is to be alone: the longest that another one may take."""


_told: list[int] = []


def tell_on_stderr() -> None:
    """From here on stderr is where it is now: called before pytest captures it."""
    _told[:] = [os.dup(2)]


def arm(seconds: float) -> None:
    """End this process after so many seconds, unless it is armed anew or disarmed."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_told[-1])


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process if the body takes longer, whatever it waits for."""
    arm(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
