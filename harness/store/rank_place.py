"""Who a process is: the variables that launchers set and ranks read. Pure functions of an environment."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LEASH = "HARNESS_LEASH_FD"
PROGRESS = "HARNESS_PROGRESS_FD"
START = "HARNESS_START"
FORK_FDS = (LEASH, PROGRESS, "")
"""Variables that name the descriptors a forked rank is given, in their order; the last, the run's lock, has none."""
DIES_WITH = "HARNESS_DIES_WITH"
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of an outer launcher that must not leak into ranks we start."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
"""Ask a rank to save and end: a scheduler's preemption, its warning before the time limit, a terminal's end, Ctrl-C."""


def stop_reason(asked: signal.Signals) -> str:
    return "interrupted by Ctrl-C" if asked is signal.SIGINT else f"{asked.name} received"


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Signals that ask to stop wait meanwhile. A process that is started inside dies of none before it listens."""
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
    """Token of this start; empty where there is one rank, or rank 0 has yet to tell it (torchrun)."""
    launcher: str
    """`local` (our own, watches us), `slurm`, `torchrun` or `inline` (this process is all there is)."""
    job: str = ""
    """SLURM job id, `123` or `123_4`."""

    @property
    def watched(self) -> bool:
        """True if a launcher of ours sees this rank's progress, its death and its exit code."""
        return self.launcher == "local"


def meeting_folder(attempt: Path, start: str) -> Path:
    """Where the ranks of one start of an attempt meet; of no use once they have ended."""
    return attempt / f"meeting-{start}"


def rank_place(environment: Mapping[str, str]) -> RankPlace:
    """Read a rank's place from its environment; a process with none is one rank of one.

    Raises:
        ValueError: a variable is not a number, or the rank is none of so many.
    """
    place = _place(environment)
    if not 0 <= place.rank < place.world_size:
        raise ValueError(f"rank {place.rank} of {place.world_size}")
    return place


def _place(environment: Mapping[str, str]) -> RankPlace:
    if LEASH in environment:
        return _numbered(environment, "local", environment.get(START, ""))
    if is_torchrun(environment):
        return _numbered(environment, "torchrun", "")
    if is_slurm_step(environment):
        return _of_slurm(environment)
    return RankPlace(rank=0, world_size=1, local_rank=0, start="", launcher="inline")


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """True if torchrun, or something that speaks its language, started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def is_slurm_step(environment: Mapping[str, str]) -> bool:
    """True if srun started this process as a rank. An sbatch script has SLURM_PROCID too, but is in no step."""
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
    job = environment["SLURM_JOB_ID"]
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return RankPlace(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        start=f"{job}.{restarts}.{environment['SLURM_STEP_ID']}",
        launcher="slurm",
        job=slurm_job(environment),
    )
