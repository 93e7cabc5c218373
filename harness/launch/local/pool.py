"""Runs on this machine, one after another, with one handler of signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.launch.local.run import Ended, LocalRun
from harness.launch.opening import Opened
from harness.launch.terminal import Listener
from harness.store.errors import EXIT_BUSY
from harness.store.files import Lock
from harness.store.rank_place import STOP_SIGNALS, stop_reason

TICK_S = 0.1


@contextmanager
def listening() -> Iterator[list[signal.Signals]]:
    """Requests to stop, Ctrl-C among them, as they come.

    Outside the main thread signals stay as they are; ignored ones stay ignored (`nohup`, a shell's `&`).
    """
    asked: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {
        number: signal.signal(number, lambda number, _: asked.append(signal.Signals(number)))
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run_here(opened: Opened, lock: Lock, listener: Listener, asked: Sequence[signal.Signals]) -> Ended:
    """Run an opened attempt to its end. Owns `lock` from here on.

    Args: asked: requests to stop, as they come; the second Ctrl-C ends the ranks at once.
    """
    run, heard = LocalRun(opened, lock, listener), 0
    while (ended := run.poll()) is None:
        time.sleep(TICK_S)
        if asked.count(signal.SIGINT) > 1:
            run.cancel(stop_reason(signal.SIGINT))
        elif len(asked) > heard:
            heard = len(asked)
            run.stop(asked[-1])
    return ended


def exit_code(codes: Sequence[int]) -> int:
    """Combined exit code: interrupted before failed before preempted before another process's before done."""
    return next((code for code in (130, 1, 75, EXIT_BUSY) if code in codes), 0)
