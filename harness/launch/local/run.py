"""One run on this machine, from its ranks' start to its final status.

A dying rank ends the others within seconds, its traceback first. A request to stop, as the first Ctrl-C, lets ranks
save at the step boundary; a second ends them. What ranks say is read in their folder: steps in the run's record,
warnings in their logs, tracebacks and stacks of a hang in files.
A single rank may run in this process (`run_inline`), so that a debugger, a profiler or a print works.

Several runs go one after another, with one handler of signals (`run_here`).
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from harness.config.derived import run_environment
from harness.config.schema import Config
from harness.launch.local.ranks import Rank, start_ranks
from harness.launch.opening import Opened
from harness.launch.terminal import Listener
from harness.store import failure, status
from harness.store.errors import EXIT_BUSY, StoreError
from harness.store.failure import Failure
from harness.store.files import Lock, write_atomic
from harness.store.metrics import decode
from harness.store.rank_place import STOP_SIGNALS, WARNING, RankPlace, rendezvous_file, stop_reason
from harness.store.rundir import cancel_requested
from harness.store.screen import unfiltered
from harness.store.status import State

LAST_WORDS_S = 1.0

LATE_S = 5.0
"""Seconds left to the others by a rank that only lost a peer, or hung: they may report late."""

STOPPED = {75, 130}
EXIT_CODES = {State.done: 0, State.failed: 1, State.preempted: 75, State.cancelled: 130}


@dataclass(frozen=True)
class Ended:
    state: State
    reason: str
    report: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


class LocalRun:
    def __init__(self, opened: Opened, lock: Lock, listener: Listener) -> None:
        """Start the ranks. Owns `lock` from here on.

        Args: listener: called with the record of every step, and with each warning of a rank as `warning`.
        """
        self.opened = opened
        self.config: Config = opened.cell.typed
        self._folder: Path = opened.run.attempt_dir(opened.attempt)
        self._start = secrets.token_hex(8)
        self._listener = listener
        self._lock = lock
        self._verdict: tuple[State, str] | None = None
        self._deadline = math.inf
        self._stops = 0
        self._record = Tail(opened.run.metrics)
        self._logs = [Tail(self._folder / f"rank{number}.log") for number in range(self.config.mesh.world_size)]
        try:
            self.ranks = start_ranks(
                opened.run.path, opened.attempt, self.config, start=self._start, lock=lock.fileno()
            )
        except BaseException as error:
            status.move(opened.run.path, opened.attempt, State.failed, f"ranks could not be started: {error}")
            lock.release()
            raise

    def poll(self) -> Ended | None:
        self._listen()
        for rank in self.ranks:
            if rank.poll():
                self._on_exit(rank)
        if all(rank.code is not None for rank in self.ranks):
            return self._close()
        if time.monotonic() >= self._deadline:
            self._kill()
        elif self._verdict is None and cancel_requested(self.opened.run.path, self.opened.attempt):
            self.cancel("cancelled on request")
        return None

    def stop(self, asked: signal.Signals) -> None:
        self._stops += 1
        if self._verdict is not None:
            self._end_within(0.0)
            return
        state = State.cancelled if asked is signal.SIGINT else State.preempted
        self._decide(state, stop_reason(asked), self.config.launch.stop_grace_s)
        if asked is signal.SIGINT:
            self._warn("Ctrl-C: the run saves after this step and ends; Ctrl-C again ends it at once, unsaved")
        for rank in self.ranks:
            rank.signal(asked)

    def cancel(self, reason: str) -> None:
        self._stops += bool(self._stops)
        self._decide(State.cancelled, reason, 0.0)
        self._kill()

    def _decide(self, state: State, reason: str, grace_s: float) -> None:
        self._verdict = self._verdict or (state, reason)
        self._end_within(grace_s)

    def _end_within(self, grace_s: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _listen(self) -> None:
        for line in self._record.lines():
            with suppress(ValueError):  # cut by a resumed run while it was read
                self._listener(decode(line))
        for log in self._logs:
            for line in log.lines():
                if line.startswith(WARNING):
                    self._warn(line.removeprefix(WARNING))

    def _on_exit(self, rank: Rank) -> None:
        if rank.code in (0, *STOPPED):
            self._end_within(self.config.launch.stop_grace_s)  # the others are at the same step boundary
            return
        late = any(each.rank == rank.number and (each.echo or each.is_hang) for each in self._failures())
        self._decide(State.failed, "", LATE_S if late else LAST_WORDS_S)

    def _failures(self) -> list[Failure]:
        told = failure.collect(self._folder)
        untold = [rank.failure() for rank in self.ranks if rank.number not in {each.rank for each in told}]
        return failure.ordered([*told, *filter(None, untold)])

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _close(self) -> Ended:
        self._listen()
        for rank in self.ranks:
            rank.close()
        rendezvous_file(self._folder, self._start).unlink(missing_ok=True)
        ended = self._judge()
        for path in self._folder.iterdir() if ended.state is State.done else ():  # logs with nothing in them
            if path.is_file() and not path.stat().st_size:
                path.unlink()
        try:
            self._write(ended)
        finally:
            self._lock.release()
        return ended

    def _judge(self) -> Ended:
        codes = {rank.code for rank in self.ranks}
        if codes == {0}:
            return Ended(State.done, self._own_reason(State.done))
        state, reason = self._verdict or (State.failed, "")
        if codes <= STOPPED:
            state = State.preempted if state is State.failed else state
            return Ended(state, self._own_reason(State.preempted, State.cancelled))
        failures = self._failures()
        if state is State.failed or (self._stops and any(not each.echo for each in failures)):
            return self._failed(failures)
        if self._stops:
            grace = f" within launch.stop_grace_s={self.config.launch.stop_grace_s:g}" if self._stops == 1 else ""
            reason = f"{reason}; not saved{grace}"
        return Ended(state, reason)

    def _own_reason(self, *states: State) -> str:
        present = self.opened.run.status()
        return present.reason if present is not None and present.state in states else "ended"

    def _failed(self, failures: list[Failure]) -> Ended:
        if not failures:
            late = [str(rank.number) for rank in self.ranks if rank.killed_by_us]
            return Ended(State.failed, f"rank {', '.join(late)} did not end with the others")
        return Ended(State.failed, failures[0].summary(), failure.report(failures))

    def _write(self, ended: Ended) -> None:
        try:
            present = self.opened.run.status()
            if present is not None and present.state is not ended.state:
                status.move(self.opened.run.path, self.opened.attempt, ended.state, ended.reason)
            if ended.report:
                write_atomic(self._folder / failure.REPORT, ended.report)
        except (OSError, StoreError) as error:
            self._warn(f"the end of {self.opened.run.path} could not be written: {error}")

    def _warn(self, text: str) -> None:
        self._listener({"warning": text})


class Tail:
    """Whole lines that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            self._read = file.seek(min(self._read, file.seek(0, os.SEEK_END)))  # a resumed run cuts its record back
            *whole, rest = file.read().split(b"\n")
            self._read = file.tell() - len(rest)
        return [line.decode(errors="replace") for line in whole]


def run_inline(opened: Opened, lock: Lock, listener: Listener) -> Ended:
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
    state = next(state for state, own in EXIT_CODES.items() if own == code)
    return Ended(state, present.reason if present is not None else "")


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
