"""Follow a run's record while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.schema import WandbMode
from harness.mirror.run import MirrorRun, settle
from harness.store.metrics import decode
from harness.store.rundir import RunDir

POLL_S = 0.5

Ended = Callable[[float], bool]
"""Waits up to so many seconds; whether no more lines will be written."""


def follow(run: RunDir, mode: WandbMode, ended: Ended) -> None:
    """Send every line of a run's record, from its first, until `ended` says so; then its results."""
    mirror = MirrorRun(run, mode, live=True)
    with run.metrics.open(encoding="utf-8") as file:
        over = False
        while not over:
            over = ended(POLL_S)
            for record in _new_lines(file):
                mirror.log(record)
    mirror.finish()
    settle()


def _new_lines(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Whole lines behind the place the file was read to; a line that is being written is left for the next call."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield decode(line)


def run_of(path: str) -> RunDir:
    """The run in a folder.

    Raises:
        StoreError: there is none.
    """
    run = RunDir(Path(path).absolute())
    run.config()
    return run
