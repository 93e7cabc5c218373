"""What a preempted SLURM job asks of its scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

from harness.store.placement import Placement

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fate:
    """What SLURM has decided about a job that was sent SIGTERM."""

    cancelled: bool = False
    """Whether somebody cancelled the job; scancel and preemption send the same signal."""
    requeued: bool = False
    """Whether the job is in the queue again already."""


def fate(place: Placement) -> Fate:
    """Ask SLURM about this job; called by rank 0."""
    if not place.job:
        return Fate()
    return judge(_scontrol("--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]).stdout, restarts())


def judge(text: str, restarts: int) -> Fate:
    """Read `scontrol show job`: a requeue counts a restart at once, and a cancelled job completes without one."""
    found = dict(re.findall(r"\b(JobState|Restarts)=(\w+)", text))
    if int(found.get("Restarts", 0)) > restarts:
        return Fate(requeued=True)
    return Fate(cancelled=found.get("JobState") in ("CANCELLED", "COMPLETING"))


def restarts() -> int:
    """How often this job was requeued before this start."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def requeue(place: Placement) -> bool:
    """Put this job back into the queue; returns whether SLURM took it. Called by rank 0.

    Only after the checkpoint is whole: SLURM kills the job's processes as soon as it has agreed.
    """
    done = _scontrol("requeue", place.job)
    if done.returncode != 0:
        sys.stderr.write(f"scontrol requeue {place.job} failed ({done.stderr.strip()}); resume with: harness retry\n")
    return done.returncode == 0


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
