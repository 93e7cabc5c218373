"""What a SLURM task does: read which run its array element is, and become the worker.

[Note: No pickles]
submitit starts a task with a pickle which it puts in place after sbatch has answered: a submitter that dies in between
leaves an array of jobs that wait for files nobody writes. Here a submission's folder holds one JSON list of its runs,
written before sbatch is called, so that whatever SLURM has accepted can run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.compose import load_config
from harness.config.rank_environment import run_environment
from harness.launch.environment import child_environment
from harness.launch.local.ranks import worker_command
from harness.store.files import write_json
from harness.store.rank_place import STOP_SIGNALS, rank_place
from harness.store.reading import read_json
from harness.store.rundir import RunDir
from harness.store.shapes import Each

FILE = "tasks.json"
TASKS = Each(list, {"run": str, "attempt": int})


def write_tasks(folder: Path, tasks: Sequence[tuple[Path, int]]) -> None:
    """Say which run and attempt each element of an array is, in its order."""
    write_json(folder / FILE, [{"run": str(run), "attempt": attempt} for run, attempt in tasks])


def read_task(folder: Path, environment: Mapping[str, str]) -> tuple[Path, int]:
    """The run and attempt of the array element this process belongs to.

    Raises:
        StoreError: the folder's list is damaged.
        LookupError: there is no list, or it is shorter than the array.
    """
    tasks = read_json(folder / FILE, TASKS)
    if tasks is None:
        raise LookupError(f"{folder / FILE} is gone; ask for the runs again")
    # a step of somebody's own allocation, which may be an array's element, has one run
    task = tasks[int(environment.get("SLURM_ARRAY_TASK_ID", 0)) if len(tasks) > 1 else 0]
    return Path(task["run"]), task["attempt"]


def become_worker(run: Path, attempt: int) -> None:
    """Replace this process by the worker, which then has the task's pid, its signals and its exit code.

    Signals that come meanwhile wait until the worker listens: a preemption in the first second is not lost.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    place = rank_place(os.environ)
    folder = RunDir(run).attempt_dir(attempt)
    log = folder / f"rank{place.rank}.log"
    command = worker_command(run, attempt)
    environment = child_environment(run_environment(load_config(RunDir(run).config()), folder), os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    become_worker(*read_task(Path(sys.argv[1]), os.environ))
