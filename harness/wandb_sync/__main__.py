"""`python -m harness.wandb_sync RUN MODE`: copy a run until standard input is closed, by its rank 0 or by its death.

Exit code 0: everything was sent; else the last line of standard error says why not.
"""

from __future__ import annotations

import select
import signal
import sys

from harness.config.schema import WandbMode
from harness.wandb_sync.follow import follow, run_of

LAST_S = 120
"""Seconds until this process ends itself if rank 0, whose limit is shorter, has not."""


def main(path: str, mode: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers tell them to every process of a job; the pipe ends this one
    try:
        follow(run_of(path), WandbMode[mode], _closed)
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
