"""A rank that makes no step for too long leaves its stacks and ends."""

from __future__ import annotations

import faulthandler
import os
from contextlib import suppress
from pathlib import Path


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
