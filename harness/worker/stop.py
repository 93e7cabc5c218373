"""Ends of a rank: a request to stop sets a flag, which the loop reads at a step boundary; with its launcher it dies."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from harness.store.rank_place import PARENT_PIPE, STOP_SIGNALS, stop_reason
from harness.store.rundir import cancel_requested

POLL_S = 1.0
OF_TERMINALS = (signal.SIGHUP, signal.SIGINT)


class StopFlag:
    """True, with a reason, if this rank was asked to stop; called by the loop.

    Args: after_interrupt: handler of a second Ctrl-C, as in `signal.signal`; None under a launcher.
    """

    def __init__(self, after_interrupt: Any = None) -> None:
        self._after_interrupt = after_interrupt
        self.reason = ""
        self.first: signal.Signals | None = None
        self.cancelled = False
        self._rehearsed_after = 0
        self._asked = 0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        self._asked += 1
        if self._asked == self._rehearsed_after:
            self.reason = self.reason or "rehearsed (launch.preempt_at)"
        return bool(self.reason)

    def rehearse(self, steps: int) -> None:
        """Stop after so many steps: the loop calls this flag once a step."""
        self._rehearsed_after = steps

    def listen(self) -> None:
        """Handle the stop signals, also pending ones (the starter may have blocked them).

        Ignored signals of a terminal stay ignored (`nohup`, a shell's `&`), a launcher's do not.
        """
        for number in STOP_SIGNALS:
            if number not in OF_TERMINALS or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch_cancel(self, run: Path, attempt: int) -> None:
        """Obey `harness cancel` too, on ranks without our launcher."""

        def watch() -> None:
            while not cancel_requested(run, attempt):
                pause.wait(POLL_S)
            self.cancelled = True
            self.reason = self.reason or "cancelled on request"

        pause = threading.Event()
        threading.Thread(target=watch, name="cancel", daemon=True).start()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.reason = self.reason or stop_reason(self.first)
        if number == signal.SIGINT and self._after_interrupt is not None:
            signal.signal(signal.SIGINT, self._after_interrupt)


def hold_on(environment: Mapping[str, str]) -> None:
    """Tie this process group to the launcher at the other end of a pipe; no-op without one.

    Nothing is written to the pipe: it becomes readable when the launcher ends. The kernel (Linux) then kills the group,
    even where the interpreter lock is held.
    """
    if PARENT_PIPE not in environment:
        return
    parent_pipe = int(environment[PARENT_PIPE])
    os.set_inheritable(parent_pipe, False)
    fcntl.fcntl(parent_pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([parent_pipe], [], [], 0)[0]:  # it was gone before
        os.killpg(0, signal.SIGKILL)
