"""Place of a process: variables that launchers set and ranks read. Pure functions of an environment."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PARENT_PIPE = "HARNESS_LEASH_FD"
START = "HARNESS_START"
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of an outer launcher that must not leak into our ranks."""

WARNING = "warning: "
"""Begin of the lines of a rank's log that its launcher shows."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
"""Signals for save and end: preemption, warning before the time limit, end of the terminal, Ctrl-C."""


def stop_reason(asked: signal.Signals) -> str:
    return "interrupted by Ctrl-C" if asked is signal.SIGINT else f"{asked.name} received"


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the stop signals, so that a process started inside survives until it handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class RankPlace:
    rank: int
    world_size: int
    local_rank: int
    start: str
    """Token of this start; empty for one rank, or until rank 0 has published it (torchrun)."""
    launcher: str
    """`local` (our own, watches us), `slurm`, `torchrun` or `inline` (this process alone)."""
    job: str = ""
    """SLURM job id, `123` or `123_4`."""

    @property
    def watched(self) -> bool:
        """True if a launcher of ours sees this rank's death and its exit code."""
        return self.launcher == "local"


def rendezvous_file(attempt: Path, start: str) -> Path:
    return attempt / f"rendezvous-{start}"


def rank_place(environment: Mapping[str, str]) -> RankPlace:
    """Place from an environment; without variables one rank of one. Raises `ValueError`: a malformed number or rank."""
    if PARENT_PIPE in environment:
        place = _numbered(environment, "local", environment.get(START, ""))
    elif "RANK" in environment and "WORLD_SIZE" in environment:
        place = _numbered(environment, "torchrun", "")
    elif is_slurm_step(environment):
        place = _of_slurm(environment)
    else:
        place = RankPlace(rank=0, world_size=1, local_rank=0, start="", launcher="inline")
    if not 0 <= place.rank < place.world_size:
        raise ValueError(f"rank {place.rank} of {place.world_size}")
    return place


def is_slurm_step(environment: Mapping[str, str]) -> bool:
    """True if srun started this process as a rank; an sbatch script has SLURM_PROCID too, but no step."""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def slurm_job(environment: Mapping[str, str]) -> str:
    """Id of the surrounding SLURM job, `123` or `123_4`; empty outside one."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def _numbered(environment: Mapping[str, str], launcher: str, start: str) -> RankPlace:
    return RankPlace(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        start=start,
        launcher=launcher,
    )


def _of_slurm(environment: Mapping[str, str]) -> RankPlace:
    job, restarts = environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT", "0")
    return RankPlace(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        start=f"{job}.{restarts}.{environment['SLURM_STEP_ID']}",
        launcher="slurm",
        job=slurm_job(environment),
    )
