"""What a rank of a SLURM job leaves for other runs: which machine broke it, and that it failed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from harness.store import failure, first_failure, nodes, provenance, status
from harness.store.errors import StoreError
from harness.store.rank_place import RankPlace
from harness.store.rundir import RunDir
from harness.store.status import State
from harness.worker.requeue import restarts


def other_failure(run: RunDir, attempt: int, place: RankPlace) -> str:
    """The run for whose failure this one need not start (launch.fail_fast); rank 0 decides, and srun ends the rest."""
    return first_failure.since(run, attempt) if place.job and place.rank == 0 else ""


def blame_the_start_before(run: RunDir, attempt: int, place: RankPlace) -> None:
    """After a requeue: if the start before ended without a word, note those of its nodes that SLURM calls down.

    A run that was preempted, or put back by hand, has said so; one whose node died has not.
    """
    if not place.job or place.rank or not restarts():
        return
    with contextlib.suppress(OSError, StoreError):
        before = status.read(run.path)
        if before is None or (before.state, before.attempt) != (State.running, attempt):
            return
        facts = provenance.read(run.path).get("environment", {})
        start = f"{facts.get('SLURM_JOB_ID')}.{facts.get('SLURM_RESTART_COUNT', '0')}"
        for node in nodes.broken(facts.get("SLURM_JOB_NODELIST", ""), alone=False):
            nodes.blame(run.path.parent.parent, node, run.name, start, "down after the run in it ended without a word")


def after_failure(run: RunDir, place: RankPlace, error: BaseException) -> None:
    """Note a machine that broke this rank, and tell the study. Never raises: the disk may be full."""
    if not place.job:
        return
    text = f"{type(error).__name__}: {error}"
    node = os.environ.get("SLURMD_NODENAME", "")
    with contextlib.suppress(OSError, StoreError):
        if node and nodes.is_of_the_machine(text) and not failure.is_echo(text):
            root = Path(run.path).parent.parent
            nodes.blame(root, node, run.name, place.start.rpartition(".")[0], text.splitlines()[0][:200])
        if run.setting("launch.fail_fast"):
            first_failure.tell(run)
