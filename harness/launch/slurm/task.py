"""A SLURM task: find the run of its array element, and become the worker.

[Note: No pickles] submitit starts a task with a pickle written after sbatch has answered: if the submitter dies in
between, jobs wait for ever. Here a JSON list of runs is written before sbatch is called, so that all accepted jobs can
run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.derived import run_environment
from harness.config.typed import load_config
from harness.launch.local.ranks import child_environment, worker_command
from harness.store.files import write_json
from harness.store.rank_place import STOP_SIGNALS, rank_place
from harness.store.reading import read_json
from harness.store.rundir import RunDir
from harness.store.shapes import Each

FILE = "tasks.json"
TASKS = Each(list, {"run": str, "attempt": int})


def write_tasks(folder: Path, tasks: Sequence[tuple[Path, int]]) -> None:
    write_json(folder / FILE, [{"run": str(run), "attempt": attempt} for run, attempt in tasks])


def read_task(folder: Path, environment: Mapping[str, str]) -> tuple[Path, int]:
    """Run and attempt of this process's array element.

    Raises `StoreError`: the list is damaged. `LookupError`: it is missing, or shorter than the array.
    """
    tasks = read_json(folder / FILE, TASKS)
    if tasks is None:
        raise LookupError(f"{folder / FILE} is gone; ask for the runs again")
    # a step of somebody's own allocation, which may be an array's element, has one run
    task = tasks[int(environment.get("SLURM_ARRAY_TASK_ID", 0)) if len(tasks) > 1 else 0]
    return Path(task["run"]), task["attempt"]


def become_worker(run: Path, attempt: int) -> None:
    """Exec the worker, which keeps the task's pid, signals and exit code.

    Signals stay blocked until the worker handles them: an early preemption is not lost.
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
