"""Follow a run's record while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.schema import WandbMode
from harness.store.metrics import decode
from harness.store.rundir import RunDir
from harness.wandb_sync.run import WandbRun, settle

POLL_S = 0.5

Ended = Callable[[float], bool]
"""Waits up to a number of seconds; True if no more lines will be written."""


def follow(run: RunDir, mode: WandbMode, ended: Ended) -> None:
    wandb_run = WandbRun(run, mode, live=True)
    with run.metrics.open(encoding="utf-8") as file:
        over = False
        while not over:
            over = ended(POLL_S)
            for record in _new_lines(file):
                wandb_run.log(record)
    wandb_run.finish()
    settle()


def _new_lines(file: IO[str]) -> Iterator[dict[str, Any]]:
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield decode(line)


def run_of(path: str) -> RunDir:
    """Raises `StoreError`: the folder holds no run."""
    run = RunDir(Path(path).absolute())
    run.config()
    return run
