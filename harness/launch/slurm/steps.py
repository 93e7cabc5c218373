"""Timed cells inside one allocation, one srun step after another, on the same machines.

[Note: Why steps] Elements of an array run anywhere and any time, so their step times are not comparable. In an
allocation (salloc, or an sbatch script that calls run.py) each cell is a step over its nodes. The request stays until
the end; ranks write their own status, as in a job.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from harness.config.compose import Cell
from harness.config.errors import refuse
from harness.launch.local.run import Ended
from harness.launch.opening import Opened
from harness.launch.slurm.batch import Shape
from harness.launch.slurm.task import write_tasks
from harness.store import status
from harness.store.files import Lock
from harness.store.provenance import python_path
from harness.store.rank_place import is_slurm_step
from harness.store.reading import read_text
from harness.store.rundir import request_cancel
from harness.store.status import State

NODES = "SLURM_JOB_NUM_NODES"


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is in a SLURM job and is none of its ranks."""
    return "SLURM_JOB_ID" in environment and not is_slurm_step(environment)


def check_allocation(cells: Sequence[Cell], environment: Mapping[str, str] = os.environ) -> None:
    """Raises `BadRequest`: a cell needs more nodes than this allocation has."""
    count = environment.get(NODES, "1")
    if not count.isdecimal():
        raise refuse(f"{NODES}={count}", "is no number of nodes, as SLURM sets it", fix=f"unset {NODES}")
    have = int(count)
    most = max(cell.config["cluster"]["nodes"] for cell in cells)
    if most > have:
        problem = f"is more than this allocation's {have} node{'s' * (have != 1)}"
        raise refuse(f"cluster.nodes={most}", problem, fix=f"salloc --nodes={most}, or cluster.nodes={have}")


def step_command(cell: Cell, folder: str) -> list[str]:
    shape = Shape(cell)
    python = [sys.executable] if shape.python is None else shlex.split(shape.python)
    ranks = shape.ranks_per_node
    sizes = [f"--nodes={shape.nodes}", f"--ntasks={shape.nodes * ranks}", f"--ntasks-per-node={ranks}"]
    return ["srun", *sizes, *shape.srun_words(), *python, "-P", "-u", "-m", "harness.launch.slurm.task", folder]


def run_step(opened: Opened, lock: Lock) -> Ended:
    """Run an opened attempt as a step of this allocation.

    Raises `KeyboardInterrupt`: Ctrl-C; the step was ended, and the run is cancelled.
    """
    path, attempt = opened.run.path, opened.attempt
    folder = opened.run.attempt_dir(attempt)
    write_tasks(folder, [(path, attempt)])
    lock.release()  # rank 0 of a job takes the run's lock itself
    step = subprocess.Popen(
        step_command(opened.cell, str(folder)),
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is this request's, which says what it means
    )
    try:
        code = step.wait()
    except KeyboardInterrupt:
        request_cancel(path, attempt)
        step.terminate()
        step.wait()
        status.move(path, attempt, State.cancelled, "interrupted by Ctrl-C")
        raise
    present = opened.run.status()
    if present is None or present.state in (State.running, State.queued):
        reason = f"srun ended with code {code}, and no rank said why; logs: {folder}"
        status.move(path, attempt, State.failed, reason)
        return Ended(State.failed, reason)
    report = read_text(folder / "error.txt") if present.state is State.failed else None
    return Ended(present.state, present.reason, report or "")
