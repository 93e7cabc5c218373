"""Processes that judge, and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def judging_processes(max_workers: int | None = None) -> ProcessPoolExecutor:
    """A pool of so many processes, or as many as there are cores. A parent that is killed closes no pool, so each
    process waits for the parent's end itself."""
    return ProcessPoolExecutor(max_workers, initializer=_end_with_parent)


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
