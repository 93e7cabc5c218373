"""Judging processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def judging_processes(max_workers: int | None = None) -> ProcessPoolExecutor:
    """Pool of `max_workers` processes, one a core by default.

    Each watches its parent, because a killed parent closes no pool.
    """
    return ProcessPoolExecutor(max_workers, initializer=_end_with_parent)


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
