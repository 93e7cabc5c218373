"""A rank that makes no step for too long shows its stacks and ends."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path
from typing import IO

from harness.worker.report import Reporter

BACKUP_S = 30.0
"""Delay of the dump that needs no interpreter lock."""


class Hang(RuntimeError):
    """No step for longer than launch.hang_timeout_s."""


def stacks_file(attempt: Path, rank: int) -> Path:
    return attempt / f"stacks-rank{rank}.txt"


def dump_on_request(attempt: Path, rank: int) -> None:
    """Dump the stack of every thread to the attempt's folder on SIGUSR1, also while stuck in C code."""
    faulthandler.register(signal.SIGUSR1, file=_open(attempt, rank), all_threads=True, chain=False)


def _open(attempt: Path, rank: int) -> IO[str]:
    return stacks_file(attempt, rank).open("w", encoding="utf-8")


class HangWatch:
    """Ends this rank when nobody calls `step` for `timeout_s` seconds.

    For ranks without a launcher of ours. All ranks of a hung collective dump their stacks at about the same time.
    Unarmed, it is a no-op: the launcher watches.
    """

    def __init__(self, timeout_s: float, reporter: Reporter, *, armed: bool) -> None:
        self._timeout_s = timeout_s
        self._reporter = reporter
        self._armed = armed
        self._last = time.monotonic()
        self._over = threading.Event()
        self._file: IO[str] | None = None

    def __enter__(self) -> HangWatch:
        if self._armed:
            self._file = _open(self._reporter.folder, self._reporter.place.rank)
            threading.Thread(target=self._watch, name="hang", daemon=True).start()
            self._arm_backup()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._armed:
            faulthandler.cancel_dump_traceback_later()

    def step(self) -> None:
        self._last = time.monotonic()
        if self._armed:
            self._arm_backup()

    def _arm_backup(self) -> None:
        assert self._file is not None
        faulthandler.dump_traceback_later(self._timeout_s + BACKUP_S, exit=True, file=self._file)

    def _watch(self) -> None:
        pause = min(1.0, self._timeout_s / 4)
        while not self._over.wait(pause):
            if time.monotonic() - self._last > self._timeout_s:
                self._end()

    def _end(self) -> None:
        assert self._file is not None
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        path = stacks_file(self._reporter.folder, self._reporter.place.rank)
        self._reporter.failed(Hang(f"no step for {self._timeout_s:g} s; stacks of this rank: {path}"))
        os._exit(1)
