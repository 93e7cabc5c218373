"""Reports of a rank in its attempt's folder: warnings in its log, tracebacks in files; its end in `status.json`.

A rank that makes no step for too long leaves its stacks and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.store import checksums, failure, status
from harness.store.errors import StoreError
from harness.store.files import write_atomic
from harness.store.rank_place import WARNING, RankPlace
from harness.store.redaction import redacted
from harness.store.status import Keeper, State

ECHO_PATIENCE_S = 5.0
"""Seconds that a rank which only lost its peer waits for that peer's cause."""

Listener = Callable[[Mapping[str, Any]], None]


class Reporter:
    """Args: listener: called with the record of every step, and with each warning as `warning`."""

    def __init__(self, run: Path, attempt: int, place: RankPlace, listener: Listener | None = None) -> None:
        self.run, self.attempt, self.place = run, attempt, place
        self.folder = run / "attempts" / str(attempt)
        self.diverged: list[int] = []
        """Steps whose loss is not finite."""
        self._listener = listener
        failure.forget(self.folder, place.rank)

    @contextlib.contextmanager
    def watching(self, timeout_s: float) -> Iterator[None]:
        """End this rank with its stacks where neither `step` nor `alive` is called for `timeout_s` seconds; a debugger
        (`launch.inline`) has all the time it wants."""
        limit = None if self.place.launcher == "inline" else timeout_s
        with HangWatch(failure.stacks_file(self.folder, self.place.rank), limit) as self._watch:
            yield

    def step(self, record: Mapping[str, Any]) -> None:
        """Args: record: of the step, as in `metrics.jsonl`."""
        self._watch.step(record["step"])
        if not math.isfinite(record["loss"]):
            self.diverged.append(record["step"])
        if self._listener is not None:
            self._listener(record)

    def alive(self) -> None:
        """Callback during long work outside steps, such as reading all weights of a large model."""
        self._watch.alive()

    def started(self) -> None:
        """Mark the run as running on rank 0, unless our launcher has. Raises `StoreError`: the record was damaged since
        the preemption."""
        if self.place.rank == 0 and not self.place.watched:
            checksums.demand(self.run)
            keeper = Keeper.slurm if self.place.job else Keeper.process
            self._write(State.running, f"started by {self.place.launcher}", keeper=keeper, job=self.place.job)

    def is_superseded(self) -> bool:
        """True if a job starts too late: its run was cancelled, or given to a newer attempt."""
        present = status.read(self.run)
        if self.place.watched or present is None:
            return False
        over = present.attempt > self.attempt or present.state is State.cancelled
        if over:
            sys.stderr.write(f"nothing to do: attempt {present.attempt} of {self.run} is {present.state.value}\n")
        return over

    def warn(self, text: str) -> None:
        """Show one line at the listener, or else in this rank's log, which our launcher reads."""
        if self._listener is not None:
            self._listener({"warning": text})
            return
        with contextlib.suppress(OSError):  # a full disk
            sys.stderr.write(f"{WARNING}{text}\n")
            sys.stderr.flush()

    @contextlib.contextmanager
    def relaying(self, logger: str) -> Iterator[None]:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warn(record.getMessage())  # type: ignore[method-assign] # instead of a subclass
        logging.getLogger(logger).addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger(logger).removeHandler(handler)

    def ended(self, state: State, reason: str) -> None:
        """Write checksums of the record and the final status, on rank 0."""
        if self.place.rank == 0:
            self._write(state, reason, checksums=checksums.write(self.run))

    def failed(self, error: BaseException) -> None:
        """Report the traceback in the attempt's folder and the log. Never raises: the disk may be full."""
        text = redacted("".join(traceback.format_exception(error)))
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        with contextlib.suppress(OSError, StoreError):
            write_atomic(failure.rank_file(self.folder, self.place.rank), text)
        if self.place.watched:
            return
        found = failure.Failure(self.place.rank, text)
        deadline = time.monotonic() + ECHO_PATIENCE_S * found.echo
        while time.monotonic() < deadline and all(each.echo for each in failure.collect(self.folder)):
            time.sleep(0.05)
        with contextlib.suppress(OSError, StoreError):
            all_told = failure.collect(self.folder) or [found]
            found = all_told[0]
            write_atomic(self.folder / failure.REPORT, failure.report(all_told))
        with contextlib.suppress(OSError, StoreError):  # small: room may be found for it alone
            self._write(State.failed, found.summary() + (f"; {failure.SILENT_PEER}" if found.echo else ""))

    def _write(self, state: State, reason: str, **changes: Any) -> None:
        fields = {"host": socket.gethostname(), "pid": os.getpid(), **changes}
        present = status.read(self.run)
        if present is None:
            status.write(self.run, status.Status(state, reason, self.attempt, **fields))
        elif not (present.attempt == self.attempt and present.state is State.cancelled):
            status.move(self.run, self.attempt, state, reason, **fields)


class HangWatch:
    """Ends this process when it shows no sign of life for too long, even where the interpreter lock is held.

    All ranks of a hung collective do so at about the same time.
    """

    def __init__(self, file: Path, timeout_s: float | None) -> None:
        """file: for the stacks of all threads. timeout_s: None to wait for ever."""
        self._path = file
        self._timeout_s = timeout_s

    def __enter__(self) -> HangWatch:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.step(0)
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def step(self, number: int) -> None:
        with suppress(OSError):  # a full disk
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, f"after step {number}\n".encode())
        self.alive()

    def alive(self) -> None:
        if self._timeout_s is not None:
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)
