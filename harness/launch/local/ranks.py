"""Processes of one run's ranks on this machine: environment, start, end. No policy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from harness.config.rank_environment import run_environment
from harness.config.schema import Config
from harness.store.failure import Failure
from harness.store.provenance import python_path
from harness.store.rank_place import FOREIGN, PARENT_PIPE, START, stop_signals_blocked

TAIL_BYTES = 2000


class Rank:
    def __init__(self, number: int, process: subprocess.Popen[bytes], parent_pipe: int, log: Path) -> None:
        self.number, self.pid, self.log = number, process.pid, log
        self.failed_at = 0.0
        self.killed_by_us = False
        self._process, self._parent_pipe = process, parent_pipe

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    def poll(self) -> bool:
        if self.code is not None or not _has_ended(self.pid):
            return False
        self.failed_at = time.time()
        self._kill_group()  # what it has started; before it is reaped, while nobody else can have its id
        self._process.wait()
        return True

    def signal(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self.code is None:
            self.killed_by_us |= not _has_ended(self.pid)  # asked twice, it was us all the same
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        os.close(self._parent_pipe)

    def failure(self) -> Failure | None:
        """Failure of a rank that left no word of it; None if it succeeded, or was killed by us."""
        if self.code is None or self.code in (0, 75) or self.killed_by_us:
            return None
        what, number = f"exited with code {self.code} and no traceback", -self.code
        if number > 0:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            what = f"killed by {name}" + "; the kernel does this when memory runs out (dmesg tells)" * (number == 9)
        tail = log_tail(self.log)
        text = what + (f"\nlast lines of {self.log}:\n{tail}" if tail else "")
        return Failure(self.number, text, self.failed_at)


def _has_ended(pid: int) -> bool:
    """True if a child has ended; it is not reaped, so that its id stays reserved."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def log_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Last lines of a log, within `size` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def start_ranks(run: Path, attempt: int, config: Config, *, start: str, lock: int) -> list[Rank]:
    """Start every rank of a run; a rank ends when its pipe closes, also by our death.

    Args: start: token of this start. lock: descriptor of the run's lock; ranks keep it until the last is gone.

    Raises `OSError`: a rank cannot be started; ranks already there were ended.
    """
    ranks: list[Rank] = []
    try:
        for number in range(config.mesh.world_size):
            folder = run / "attempts" / str(attempt)
            variables = rank_environment(config, number, start=start, attempt=folder)
            ranks.append(_start_rank(run, attempt, number, variables, lock))
    except BaseException:
        for rank in ranks:
            rank.close()
        raise
    return ranks


def _start_rank(run: Path, attempt: int, number: int, variables: dict[str, str], lock: int) -> Rank:
    log = run / "attempts" / str(attempt) / f"rank{number}.log"
    held, parent_pipe = os.pipe()
    try:
        with log.open("ab") as output, stop_signals_blocked():  # until the rank listens: it saves, and does not die
            process = subprocess.Popen(
                worker_command(run, attempt),
                env=child_environment(variables | {PARENT_PIPE: str(held)}, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(held, lock),
                process_group=0,  # a terminal's Ctrl-C is the launcher's, and one kill reaches all of a rank
            )
    except BaseException:
        os.close(parent_pipe)
        raise
    finally:
        os.close(held)
    return Rank(number, process, parent_pipe, log)


def worker_command(run: Path, attempt: int) -> list[str]:
    """Command of one rank; `-P` excludes a stray `harness` in the working directory."""
    return [sys.executable, "-P", "-m", "harness.worker", str(run), "--attempt", str(attempt)]


def rank_environment(config: Config, rank: int, *, start: str, attempt: Path | None = None) -> dict[str, str]:
    """Variables of one rank on this machine. Args: rank: global, local too. start: token. attempt: of its logs."""
    return run_environment(config, attempt) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.mesh.world_size),
        START: start,
    }


def child_environment(variables: Mapping[str, str], parent: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in parent.items() if name not in FOREIGN}
    return kept | {"PYTHONPATH": python_path(parent)} | dict(variables)
