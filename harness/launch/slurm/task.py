"""What a SLURM task does: become the worker. All that submitit pickles is three words."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.config.compose import load_config
from harness.launch.environment import child_environment, run_environment
from harness.launch.local.ranks import worker_command
from harness.store.placement import STOP_SIGNALS, placement
from harness.store.rundir import RunDir


@dataclass(frozen=True)
class Task:
    """One rank of a submitted attempt, as a callable without arguments."""

    run: str
    attempt: int

    def __call__(self) -> None:
        """Replace this process by the worker, which then has the task's pid, its signals and its exit code.

        Signals that come meanwhile wait until the worker listens: a preemption in the first second is not lost.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        place = placement(os.environ)
        run = RunDir(Path(self.run))
        folder = run.attempt_dir(self.attempt)
        log = folder / f"rank{place.rank}.log"
        command = worker_command(Path(self.run), self.attempt)
        environment = child_environment(run_environment(load_config(run.config()), folder), os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.execve(command[0], command, environment)
