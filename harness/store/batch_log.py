"""Reasons from a batch script's log: SLURM calls a job FAILED whose step it killed for its memory."""

from __future__ import annotations

import re
from pathlib import Path

from harness.store.errors import StoreError
from harness.store.reading import open_regular

SUBMISSIONS = ".submit"

TAIL_BYTES = 1 << 16

_MEMORY = re.compile(rb"exceeded (?:job |step )?memory limit|oom[-_ ]kill", re.IGNORECASE)
"""Words of slurmstepd for its own memory limit (`OverMemoryKill`), and for the kernel's (cgroups)."""


def memory(run: Path, submission: str, job: str) -> str:
    try:
        file = open_regular(run.parent / SUBMISSIONS / submission / f"{job}_0_log.out")
    except (OSError, StoreError):
        return ""
    if file is None:
        return ""
    with file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        found = _MEMORY.search(file.read(TAIL_BYTES))
    return "; SLURM ended it for the memory it used: ask for more (cluster.mem_gb)" if found else ""
