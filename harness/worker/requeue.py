"""What a preempted SLURM job asks of its scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from harness.store.placement import Placement

TIMEOUT_S = 60.0


def was_cancelled(place: Placement) -> bool:
    """Whether SLURM ends this job because somebody cancelled it; scancel and preemption send the same signal."""
    return place.launcher == "slurm" and _job_state() in {"CANCELLED", "COMPLETING"}


def requeue(place: Placement) -> bool:
    """Put this job back into the queue, from rank 0 alone; returns whether SLURM took it.

    Called by every rank after the checkpoint is whole. SLURM kills the job's processes as soon as it has agreed.
    """
    if place.rank != 0 or not place.job:
        return False
    done = _scontrol("requeue", place.job)
    if done.returncode != 0:
        sys.stderr.write(f"scontrol requeue {place.job} failed ({done.stderr.strip()}); resume with: harness retry\n")
    return done.returncode == 0


def _job_state() -> str:
    text = _scontrol("--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]).stdout
    match = re.search(r"\bJobState=(\w+)", text)
    return match.group(1) if match else ""


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
