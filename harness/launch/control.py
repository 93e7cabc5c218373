"""Ending runs, and retrying failed ones."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from harness.config.compose import Cell
from harness.config.errors import refuse
from harness.config.schema import Rerun
from harness.launch.plan import in_blocks
from harness.launch.slurm.scheduler import Scheduler, SlurmError, ask, probe
from harness.launch.submit import submit
from harness.launch.terminal import Terminal
from harness.store import commands, provenance, status
from harness.store.errors import StoreError
from harness.store.files import is_held
from harness.store.rundir import CONFIG, RunDir, Store, request_cancel
from harness.store.status import MOVING, OWNER_LOCK, Keeper, State, Status

CANCEL_TIMEOUT_S = 30.0


def runs_of(store: Store, ref: str) -> list[RunDir]:
    """Runs of a study of that name, else the one run. Raises `StoreError`: there is neither."""
    return store.runs(ref) if ref in store.studies() else [store.find(ref)]


def retry(store: Store, ref: str) -> int:
    """Start a new attempt of every failed, lost, preempted or cancelled run; returns the exit code.

    Raises `BadRequest`: a run is a copy whose attempt would lie elsewhere; nothing was started.
    """
    return submit(in_blocks([frozen(run) for run in runs_of(store, ref)]))


def frozen(run: RunDir) -> Cell:
    """Cell of a run in its present store; done runs are never repeated.

    Raises `BadRequest`: another program made it, or it is a copy under another study or name. `StoreError`: its
    configuration is incomplete.
    """
    if provenance.WATCHED in provenance.read(run.path):
        problem = "is of another program, which harness.capture or an import recorded"
        raise refuse(f"retry {run.path}", problem, fix="start that program again, with a folder of its own")
    config = run.config()
    store = Store(run.path.parent.parent)
    try:
        launch = config["launch"] | {"root": str(store.root), "rerun": Rerun.never.name}
        cell = Cell(config | {"launch": launch}, run.overrides())
        where = store.path_of(cell)
    except KeyError as error:
        problem = f"has no {error.args[0]}: it was cut or edited, or an older version made the run"
        raise StoreError(f"{run.path / CONFIG} {problem}") from error
    if where != run.path:
        fix = f"{commands.request(f'--from {shlex.quote(str(run.path))}')} makes it anew"
        raise refuse(f"retry {run.path}", f"is not where its cell is run: {where}", fix=fix)
    return cell


def cancel(store: Store, ref: str, terminal: Terminal | None = None) -> int:
    """End every living run of `ref`; 0 when all have ended, 1 when one has not.

    Raises `StoreError`: there is no such run, or SLURM refused.
    """
    terminal = terminal or Terminal()
    scheduler = probe()
    living = [(run, found) for run in runs_of(store, ref) if (found := _alive(run, scheduler)) is not None]
    if not living:
        terminal.line(f"nothing to cancel: no run of {ref} is queued or running")
        return 0
    _cancel_jobs([(run, found) for run, found in living if found.keeper is Keeper.slurm], scheduler)
    ours = [(run, found) for run, found in living if found.keeper is Keeper.process]
    for run, found in ours:
        request_cancel(run.path, found.attempt)
    deadline, left = time.monotonic() + CANCEL_TIMEOUT_S, [run for run, _ in ours]
    while (left := [run for run in left if is_held(run.path / OWNER_LOCK)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for run, _ in living:
        terminal.line(f"{run.path}: {'does not end' if run in left else 'cancelled'}")
    return int(bool(left))


def _alive(run: RunDir, scheduler: Scheduler | None) -> Status | None:
    found = status.effective(run.path, scheduler)
    if found is None or found.state not in MOVING:
        return None
    return None if found.keeper is Keeper.process and found.state is State.preempted else found


def _cancel_jobs(living: Sequence[tuple[RunDir, Status]], scheduler: Scheduler | None) -> None:
    if not living:
        return
    if scheduler is None:
        raise StoreError("these runs are SLURM jobs, and there is no squeue here; cancel them on a login node")
    try:
        if jobs := [job.id for _, found in living if (job := scheduler.job_of(found)) is not None]:
            ask("scancel", *jobs)
    except SlurmError as error:
        raise StoreError(f"SLURM did not cancel: {error}") from error
    for run, found in living:
        present = run.status()
        if present is not None and present.attempt == found.attempt and present.state in MOVING:
            status.move(run.path, found.attempt, State.cancelled, "cancelled on request")
