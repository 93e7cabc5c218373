"""`<root>/<study>/.failed`: the run that failed last, so that others of its study need not start (launch.fail_fast)."""

from __future__ import annotations

import os

from harness.store.errors import StoreError
from harness.store.files import write_atomic
from harness.store.reading import read_text
from harness.store.rundir import RunDir

FILE = ".failed"


def tell(run: RunDir) -> None:
    write_atomic(run.path.parent / FILE, f"{run.path.name}\n")


def since(run: RunDir, attempt: int) -> str:
    """Name of a run of the same study that failed since this attempt was submitted; may be empty.

    Times are the file system's own, independent of hosts' clocks.
    """
    marker = run.path.parent / FILE
    try:
        later = os.stat(marker).st_mtime_ns > os.stat(run.attempt_dir(attempt) / "submit.sh").st_mtime_ns
        return (read_text(marker) or "another").strip() if later else ""
    except (OSError, StoreError):
        return ""
