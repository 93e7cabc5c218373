"""Processes of one run's ranks on this machine: environment, start, end. No policy.

Ranks are forks of one server, which imports torch once for all runs of this process (`multiprocessing`'s forkserver).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from harness.config.derived import run_environment
from harness.config.schema import Config
from harness.store.failure import Failure
from harness.store.provenance import python_path
from harness.store.rank_place import FOREIGN, PARENT_PIPE, START, stop_signals_blocked

TAIL_BYTES = 2000
SERVER = multiprocessing.get_context("forkserver")
LONGEST_FOLDER = 70
"""Characters of a temporary folder in which the server can have its socket, whose path has at most 107."""


class Rank:
    def __init__(self, number: int, process: BaseProcess, parent_pipe: Connection, log: Path) -> None:
        assert process.pid is not None
        self.number, self.pid, self.log = number, process.pid, log
        self.code: int | None = None
        """Exit code, negative for a signal; None while it runs."""
        self.failed_at = 0.0
        self.killed_by_us = False
        self._process, self._parent_pipe = process, parent_pipe
        atexit.register(self.close)  # before multiprocessing's own, which waits for what runs

    def poll(self) -> bool:
        if self.code is not None or self._process.exitcode is None:
            return False
        self.code, self.failed_at = self._process.exitcode, time.time()
        self._kill_group()  # what it has started
        return True

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        if self.code is None:
            self.killed_by_us |= self._process.exitcode is None  # asked twice, it was us all the same
            self._kill_group()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # one that has just begun has no group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
                return

    def close(self) -> None:
        atexit.unregister(self.close)
        self.kill()
        self._process.join()
        self.code = self._process.exitcode
        self._parent_pipe.close()

    def failure(self) -> Failure | None:
        """Failure of a rank that left no word of it; None if it succeeded, or was killed by us."""
        if self.code in (None, 0, 75) or (self.killed_by_us and self.code == -signal.SIGKILL):
            return None
        what, number = f"exited with code {self.code} and no traceback", -self.code
        if number > 0:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            what = f"killed by {name}" + "; the kernel does this when memory runs out (dmesg tells)" * (number == 9)
        tail = log_tail(self.log)
        text = what + (f"\nlast lines of {self.log}:\n{tail}" if tail else "")
        return Failure(self.number, text, self.failed_at)


def log_tail(path: Path) -> str:
    """Last lines of a log, within `TAIL_BYTES`."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
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
        resource_tracker.ensure_running()  # the server does so too, and then unblocks signals
        with stop_signals_blocked():  # until a rank listens: it saves, and does not die
            _start_server(config)
            for number in range(config.mesh.world_size):
                folder = run / "attempts" / str(attempt)
                variables = rank_environment(config, number, start=start, attempt=folder)
                ranks.append(_start_rank(run, attempt, number, variables, lock))
    except BaseException:
        for rank in ranks:
            rank.close()
        raise
    return ranks


def _start_server(config: Config) -> None:
    """Start the server, unless it runs, with the variables that are read when a process, or torch, begins."""
    before, folder = dict(os.environ), tempfile.gettempdir()
    alone = {"PYTHONSAFEPATH": "1"}  # or a stray `harness` in the working directory would be every rank's
    os.environ.update(child_environment(run_environment(config) | alone, before))
    try:
        if len(folder) > LONGEST_FOLDER:
            tempfile.tempdir = "/tmp"
        SERVER.set_forkserver_preload(["harness.launch.local.preload"])
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        os.environ.clear()
        os.environ.update(before)


def _start_rank(run: Path, attempt: int, number: int, variables: dict[str, str], lock: int) -> Rank:
    log = run / "attempts" / str(attempt) / f"rank{number}.log"
    log.open("ab").close()
    held, parent_pipe = SERVER.Pipe(duplex=False)
    environment, words = child_environment(variables, os.environ), worker_command(run, attempt)[3:]
    try:
        with held, Connection(os.dup(lock), writable=False) as kept, _apart():
            process = SERVER.Process(target=_be_rank, args=(words, environment, log, held, kept))
            process.start()
    except BaseException:
        parent_pipe.close()
        raise
    return Rank(number, process, parent_pipe, log)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Keep multiprocessing from running this process's script again in each rank, and its start method (joblib's)."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        sys.modules["__main__"] = main


def _be_rank(words: list[str], variables: dict[str, str], log: Path, held: Connection, kept: Connection) -> None:
    """Be `python -m WORDS`, in a fork of the server; never returns.

    held: end of the pipe to the launcher. kept: the run's lock, open to the end of the last rank.
    """
    os.setpgid(0, 0)  # a terminal's Ctrl-C is the launcher's, and one kill reaches all of a rank
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(variables, **{PARENT_PIPE: str(held.fileno())})
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


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
