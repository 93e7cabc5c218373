"""One run on this machine, from its ranks' start to its final status.

A dying rank ends the others within seconds, its traceback first. A request to stop, as the first Ctrl-C, lets ranks
save at the step boundary; a second ends them. Ranks without progress dump their stacks first.
A single rank may run in this process (`run_inline`), so that a debugger, a profiler or a print works.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.config.rank_environment import run_environment
from harness.config.schema import Config
from harness.launch.local.ranks import Rank, start_ranks
from harness.launch.opening import Opened
from harness.store import failure, status
from harness.store.errors import StoreError
from harness.store.failure import Failure
from harness.store.files import Lock, write_atomic
from harness.store.rank_place import RankPlace, rendezvous_file, stop_reason
from harness.store.reading import read_text
from harness.store.rundir import cancel_requested
from harness.store.screen import unfiltered
from harness.store.status import State

LAST_WORDS_S = 1.0

CAUSE_S = 5.0
"""Seconds in which a rank that only lost a peer is no cause, because the failed one may report late."""

STACKS_S = 2.0

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
    def __init__(
        self,
        opened: Opened,
        lock: Lock,
        listener: Callable[[dict[str, Any]], None],
        devices: Sequence[str] = (),
    ) -> None:
        """Start the ranks. Owns `lock` from here on.

        Args: listener: called with every message of every rank.
        """
        self.opened = opened
        self.config: Config = opened.cell.typed
        self.devices = tuple(devices)
        self._folder: Path = opened.run.attempt_dir(opened.attempt)
        self._start = secrets.token_hex(8)
        self._listener = listener
        self._lock = lock
        self._verdict: tuple[State, str] | None = None
        self._deadline: float | None = None
        self._stops = 0
        self._stacks = ""
        self._steps: dict[int, int] = {}
        try:
            self.ranks = start_ranks(
                opened.run.path,
                opened.attempt,
                self.config,
                start=self._start,
                lock=lock.fileno(),
                devices=devices,
            )
        except BaseException as error:
            status.move(opened.run.path, opened.attempt, State.failed, f"ranks could not be started: {error}")
            lock.release()
            raise
        self._last_step = time.monotonic()

    def poll(self) -> Ended | None:
        self._listen()
        for rank in self.ranks:
            if rank.poll():
                self._on_exit(rank)
        if all(rank.code is not None for rank in self.ranks):
            return self._close()
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._kill()
        elif self._verdict is None and cancel_requested(self.opened.run.path, self.opened.attempt):
            self.cancel("cancelled on request")
        elif now - self._last_step > self.config.launch.hang_timeout_s and self._verdict is None:
            self._on_hang()
        return None

    def stop(self, asked: signal.Signals) -> None:
        self._stops += 1
        if self._verdict is not None:
            self._end_by(0.0)
            return
        self._decide(*_end_of(asked), self.config.launch.stop_grace_s)
        if asked is signal.SIGINT:
            self._warn("Ctrl-C: the run saves after this step and ends; Ctrl-C again ends it at once, unsaved")
        for rank in self.ranks:
            rank.signal(asked)

    def cancel(self, reason: str) -> None:
        self._stops += bool(self._stops)
        self._decide(State.cancelled, reason, 0.0)
        self._kill()

    def _decide(self, state: State, reason: str, grace_s: float) -> None:
        if self._verdict is None:
            self._verdict = (state, reason)
        self._end_by(grace_s)

    def _end_by(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _listen(self) -> None:
        for rank in self.ranks:
            for message in rank.messages():
                self._last_step = time.monotonic()
                if message["kind"] == "step":
                    self._steps[rank.number] = message["step"]
                self._listener(message)

    def _on_exit(self, rank: Rank) -> None:
        if rank.code not in (0, *STOPPED):
            found = rank.failure()
            self._decide(State.failed, "", CAUSE_S if found is not None and found.echo else LAST_WORDS_S)
        else:
            self._end_by(self.config.launch.stop_grace_s)  # the others are at the same step boundary

    def _on_hang(self) -> None:
        reason = f"no step for {self.config.launch.hang_timeout_s:g} s"
        for rank in self.ranks:
            rank.signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        made = ", ".join(f"rank {rank.number}: {self._steps.get(rank.number, 0)}" for rank in self.ranks)
        self._stacks = f"last steps: {made}\n\n{_stacks(self._folder)}"
        self._decide(State.failed, reason, 0.0)
        self._kill()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _close(self) -> Ended:
        self._listen()
        for rank in self.ranks:
            rank.close()
        rendezvous_file(self._folder, self._start).unlink(missing_ok=True)
        ended = self._judge()
        if ended.state is State.done:
            for path in self._folder.iterdir():  # logs and stacks with nothing in them
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
        failures = failure.ordered([found for rank in self.ranks if (found := rank.failure()) is not None])
        if state is State.failed or (self._stops and any(not each.echo for each in failures)):
            return self._failed(failures, reason)
        if self._stops:
            grace = f" within launch.stop_grace_s={self.config.launch.stop_grace_s:g}" if self._stops == 1 else ""
            reason = f"{reason}; not saved{grace}"
        return Ended(state, reason)

    def _own_reason(self, *states: State) -> str:
        present = self.opened.run.status()
        return present.reason if present is not None and present.state in states else "ended"

    def _failed(self, failures: list[Failure], reason: str) -> Ended:
        if self._stacks:
            return Ended(State.failed, f"hang: {reason}", f"{reason}; {self._stacks}")
        if not failures:
            late = [str(rank.number) for rank in self.ranks if rank.killed_by_us]
            return Ended(State.failed, f"rank {', '.join(late)} did not end with the others", "")
        return Ended(State.failed, failures[0].summary(), failure.report(failures))

    def _write(self, ended: Ended) -> None:
        path, attempt = self.opened.run.path, self.opened.attempt
        self._try(lambda: status.move(path, attempt, ended.state, ended.reason) if self._is_news(ended) else None)
        if ended.report:
            self._try(lambda: write_atomic(self._folder / failure.REPORT, ended.report))

    def _is_news(self, ended: Ended) -> bool:
        present = self.opened.run.status()
        return present is not None and present.state is not ended.state

    def _try(self, write: Callable[[], object]) -> None:
        """Status and summary are written apart: one may find room where the other does not."""
        try:
            write()
        except (OSError, StoreError) as error:
            self._warn(f"the end of {self.opened.run.path} could not be written: {error}")

    def _warn(self, text: str) -> None:
        self._listener({"kind": "warning", "text": text})


def _end_of(asked: signal.Signals) -> tuple[State, str]:
    return State.cancelled if asked is signal.SIGINT else State.preempted, stop_reason(asked)


def _stacks(attempt: Path) -> str:
    files = sorted(attempt.glob("stacks-rank*.txt"))
    none = "(none: the process is stopped, or too stuck to take a signal)"
    return "\n".join(f"{path.stem}:\n{(read_text(path) or '').rstrip() or none}\n" for path in files)


STATES = {code: state for state, code in EXIT_CODES.items()}


def run_inline(opened: Opened, lock: Lock, listener: Callable[[dict[str, Any]], None]) -> Ended:
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
    return Ended(STATES[code], present.reason if present is not None else "")
