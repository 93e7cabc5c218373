"""Ends of a rank: a request to stop sets a flag, which the loop reads at a step boundary; with its launcher it dies.

A preempted SLURM job is requeued.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from harness.store import commands
from harness.store.rank_place import PARENT_PIPE, STOP_SIGNALS, RankPlace, stop_reason, stop_signals_blocked
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


TIMEOUT_S = 60.0
TRIES, PAUSE_S = 3, 2.0
"""Attempts to requeue, and the seconds between: a busy controller loses requests."""


@dataclass(frozen=True)
class Fate:
    cancelled: bool = False
    """True if somebody cancelled the job; scancel and preemption send the same signal."""
    requeued: bool = False
    """True if the job is in the queue again already."""


def fate_of(place: RankPlace) -> Fate:
    if not place.job:
        return Fate()
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return judge(_scontrol("--oneliner", "show", "job", place.job).stdout, place.job, restarts)


def judge(text: str, job: str, restarts: int) -> Fate:
    """Fate from `scontrol --oneliner show job`: a requeue counts a restart at once, and a cancelled job completes
    without.

    Only the record of `job` (`123` or `123_4`) counts: the last element of an array has the array's own number as its
    JobId, whose query prints every element.
    """
    # the first of a name: comments and command lines, which say anything, come late
    records = (dict(reversed(re.findall(r"\b(\w+)=(\S*)", line))) for line in text.splitlines())
    found = next((record for record in records if _number(record) == job), {})
    restarted = found.get("Restarts", "")
    if restarted.isdecimal() and int(restarted) > restarts:
        return Fate(requeued=True)
    return Fate(cancelled=found.get("JobState") in ("CANCELLED", "COMPLETING"))


def _number(record: Mapping[str, str]) -> str:
    array, index = record.get("ArrayJobId"), record.get("ArrayTaskId", "")
    return f"{array}_{index}" if array and index.isdigit() else record.get("JobId", "")


def requeue(place: RankPlace, run: Path) -> bool:
    """Requeue this job; True if SLURM accepted. Called by rank 0, after the checkpoint is complete: SLURM kills the job
    at once."""
    for _ in range(TRIES):
        done = _scontrol("requeue", place.job)
        if done.returncode == 0:
            return True
        time.sleep(PAUSE_S)
    why = done.stderr.strip() or f"exit {done.returncode}"
    resume = commands.verb(f"retry {shlex.quote(str(run))}")
    sys.stderr.write(f"scontrol requeue {place.job} failed ({why}); resume with: {resume}\n")
    return False


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        # SLURM sends them to every process of a step, several times, and one that does not listen dies of them
        with stop_signals_blocked():
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
