"""Processes that judge end with who started them, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.mutants import kills

PROGRAM = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from harness.parity.study import judging_processes
def work(_):
    os.write(1, f"{{os.getpid()}}\\n".encode())  # in one piece: three write to one pipe
    time.sleep(600)
if __name__ == "__main__":
    with {pool}(max_workers=3) as pool:
        list(pool.map(work, range(3)))
"""


def left(asked: signal.Signals, pool: str = "judging_processes") -> list[psutil.Process]:
    """Workers that are there seconds after the program was killed; they are killed then."""
    program = PROGRAM.format(pool=pool)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        workers = [psutil.Process(int(started.stdout.readline())) for _ in range(3)]
        started.send_signal(asked)
        started.wait()
        _, alive = psutil.wait_procs(workers, timeout=15 if pool == "judging_processes" else 1)
        for worker in alive:
            worker.kill()
    return alive


@pytest.mark.parametrize("asked", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_verdict_leaves_no_workers(asked: signal.Signals) -> None:
    assert left(asked) == []


@kills("Ends of a run", "a pool without its parent", "A killed verdict leaves processes that wait for work for ever")
def test_workers_that_outlive_their_parent_are_found() -> None:
    assert left(signal.SIGKILL, "ProcessPoolExecutor")
