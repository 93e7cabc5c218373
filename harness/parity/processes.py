"""Processes that judge, and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def judging_processes() -> ProcessPoolExecutor:
    """A pool of as many processes as there are cores. A killed parent closes no pool: each waits for its end itself."""
    return ProcessPoolExecutor(initializer=_end_with_parent)


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
