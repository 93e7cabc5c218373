"""`python -m harness.wandb_sync RUN MODE`: copy a run until standard input is closed, by its rank 0 or by its death.

Exit code 0: everything was sent; else the last line of standard error says why not.
"""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.schema import WandbMode
from harness.store.metrics import decode
from harness.store.rundir import RunDir
from harness.wandb_sync.run import WandbRun, settle

LAST_S = 120
"""Seconds until this process ends itself if rank 0, whose limit is shorter, has not."""


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


def main(path: str, mode: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers tell them to every process of a job; the pipe ends this one
    try:
        run = RunDir(Path(path).absolute())
        run.config()  # raises where the folder holds no run
        follow(run, WandbMode[mode], _closed)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _closed(timeout_s: float) -> bool:
    closed = bool(select.select([sys.stdin], [], [], timeout_s)[0])
    if closed:
        signal.alarm(LAST_S)
    return closed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
