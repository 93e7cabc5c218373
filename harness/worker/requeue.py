"""Requeueing of a preempted SLURM job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.store import commands
from harness.store.rank_place import RankPlace, stop_signals_blocked

TIMEOUT_S = 60.0
TRIES, PAUSE_S = 3, 2.0
"""Attempts to requeue, and the seconds between: a busy controller loses requests."""


@dataclass(frozen=True)
class Fate:
    cancelled: bool = False
    """True if somebody cancelled the job; scancel and preemption send the same signal."""
    requeued: bool = False
    """True if the job is in the queue again already."""


def fate(place: RankPlace) -> Fate:
    if not place.job:
        return Fate()
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return judge(_scontrol("--oneliner", "show", "job", place.job).stdout, place.job, restarts)


def judge(text: str, job: str, restarts: int) -> Fate:
    """Fate from `scontrol --oneliner show job`: a requeue counts a restart at once, and a cancelled job completes
    without.

    Only the record of `job` (`123` or `123_4`) counts: the last element of an array has the array's own number as its
    JobId, whose query prints every element.
    """
    # the first of a name: comments and command lines, which say anything, come late
    records = (dict(reversed(re.findall(r"\b(\w+)=(\S*)", line))) for line in text.splitlines())
    found = next((record for record in records if _number(record) == job), {})
    restarted = found.get("Restarts", "")
    if restarted.isdecimal() and int(restarted) > restarts:
        return Fate(requeued=True)
    return Fate(cancelled=found.get("JobState") in ("CANCELLED", "COMPLETING"))


def _number(record: Mapping[str, str]) -> str:
    array, index = record.get("ArrayJobId"), record.get("ArrayTaskId", "")
    return f"{array}_{index}" if array and index.isdigit() else record.get("JobId", "")


def requeue(place: RankPlace, run: Path) -> bool:
    """Requeue this job; True if SLURM accepted. Called by rank 0, after the checkpoint is complete: SLURM kills the job
    at once."""
    for _ in range(TRIES):
        done = _scontrol("requeue", place.job)
        if done.returncode == 0:
            return True
        time.sleep(PAUSE_S)
    why = done.stderr.strip() or f"exit {done.returncode}"
    resume = commands.verb(f"retry {shlex.quote(str(run))}")
    sys.stderr.write(f"scontrol requeue {place.job} failed ({why}); resume with: {resume}\n")
    return False


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        # SLURM sends them to every process of a step, several times, and one that does not listen dies of them
        with stop_signals_blocked():
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
