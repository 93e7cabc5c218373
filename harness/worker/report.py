"""Reports of a rank: progress to its launcher, tracebacks to files, its end to `status.json`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.store import checksums, failure, status
from harness.store.errors import StoreError
from harness.store.files import write_atomic
from harness.store.rank_place import PROGRESS, RankPlace
from harness.store.redaction import redacted
from harness.store.status import Keeper, State

ECHO_PATIENCE_S = 5.0
"""Seconds that a rank which only lost its peer waits for that peer's cause."""

LONGEST = 2000
"""Most characters of a forwarded log line: a message must fit into a pipe at once."""

ERROR_PATIENCE_S = 2.0
"""Seconds that a rank waits for room in its launcher's pipe to hand over a traceback."""


Listener = Callable[[dict[str, Any]], None]


class ProgressPipe:
    """Rank's end of its launcher's pipe. It never blocks training: a message without room is dropped."""

    def __init__(self, environment: Mapping[str, str], listener: Listener | None = None) -> None:
        self._listener = listener
        self._descriptor = int(environment.get(PROGRESS, -1))
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            os.set_blocking(self._descriptor, False)

    def send(self, kind: str, **fields: Any) -> None:
        """Write one message below a pipe's atomic size; dropped without launcher or room."""
        if self._listener is not None:
            self._listener({"kind": kind, **fields})
        if self._descriptor >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._descriptor, _line(kind, fields))

    def send_patiently(self, kind: str, **fields: Any) -> None:
        """Write one message of any size, with a short wait for room; for a dying rank."""
        data = _line(kind, fields)
        deadline = time.monotonic() + ERROR_PATIENCE_S
        while self._descriptor >= 0 and data and time.monotonic() < deadline:
            try:
                data = data[os.write(self._descriptor, data[:4096]) :]
            except BlockingIOError:
                time.sleep(0.01)
            except BrokenPipeError:
                return


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return (json.dumps({"kind": kind, **fields}) + "\n").encode()


class Reporter:
    def __init__(self, run: Path, attempt: int, place: RankPlace, listener: Listener | None = None) -> None:
        self.run = run
        self.attempt = attempt
        self.place = place
        self.folder = run / "attempts" / str(attempt)
        self.pipe = ProgressPipe(os.environ, listener)
        failure.forget(self.folder, place.rank)

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
        """Print one line at the launcher, or else in this rank's log."""
        self.pipe.send("warning", text=text)
        if not self.place.watched and self.place.launcher != "inline":
            sys.stderr.write(f"warning: {text}\n")

    @contextlib.contextmanager
    def relaying(self, logger: str) -> Iterator[None]:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warn(record.getMessage()[:LONGEST])  # type: ignore[method-assign]
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
        """Report the traceback to the launcher, the attempt's folder, and the log. Never raises: the disk may be
        full."""
        text = redacted("".join(traceback.format_exception(error)))
        self.pipe.send_patiently("error", text=text)
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        with contextlib.suppress(OSError, StoreError):
            write_atomic(failure.rank_file(self.folder, self.place.rank), text)
        if not self.place.watched:
            self._tell_cause(text)

    def _tell_cause(self, text: str) -> None:
        deadline = time.monotonic() + ECHO_PATIENCE_S * failure.is_echo(text)
        while time.monotonic() < deadline and all(each.echo for each in failure.collect(self.folder)):
            time.sleep(0.05)
        found = failure.Failure(self.place.rank, text)
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
