"""State of a run: one small file, a table of moves, and a test for dead owners.

`status.json` holds the state at its last write. A state that needs a living owner (queued, running) counts only while
that owner lives: `effective` checks, and calls the run lost otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from harness.store.errors import StoreError
from harness.store.files import held, is_held, write_json
from harness.store.reading import read_json
from harness.store.shapes import Shape

FILE = "status.json"
OWNER_LOCK = ".lock"
WRITE_LOCK = ".status.lock"
SUBMISSIONS = ".submit"
"""Folder under a study: scripts and logs of its submissions."""
State = StrEnum("State", "queued running preempted done failed cancelled lost")
Keeper = StrEnum("Keeper", "process slurm")
"""Owner of a live run: a process on a host that holds the run's lock, or a SLURM job."""
MOVES: dict[State, frozenset[State]] = {
    State.queued: frozenset({State.queued, State.running, State.failed, State.cancelled, State.lost}),
    State.running: frozenset(
        {State.running, State.done, State.failed, State.preempted, State.cancelled, State.lost, State.queued}
    ),
    State.preempted: frozenset({State.queued, State.running, State.cancelled, State.lost, State.failed}),
    State.done: frozenset({State.queued, State.running, State.failed}),
    State.failed: frozenset({State.queued, State.running}),
    State.cancelled: frozenset({State.queued, State.running}),
    State.lost: frozenset({State.queued, State.running, State.done, State.failed, State.preempted, State.cancelled}),
}
"""Allowed moves. `done -> failed`: a rank died after the last step. `lost ->`: the owner was alive after all."""
RESTARTS = frozenset({State.queued, State.running})
MOVING = frozenset({State.queued, State.running, State.preempted})
"""States of a run that may go on by itself."""


@dataclass(frozen=True)
class Status:
    state: State
    reason: str
    attempt: int
    keeper: Keeper = Keeper.process
    host: str = ""
    """Host of the process that keeps the run alive, or of rank 0."""
    pid: int = 0
    """Id of the process on `host`; for people, never a test of its life."""
    job: str = ""
    """SLURM job id, `123` or `123_4`; empty until sbatch has answered."""
    submission: str = ""
    """Token in the SLURM job's name, written before sbatch, so that a crash between the two loses nothing."""
    index: int = 0
    wandb: str = ""
    """Why the wandb copy of this attempt failed; may be empty."""
    steps: int = 0
    """Steps of the run, so that a table of a thousand runs reads no configuration; 0: unknown."""
    checksums: str = ""
    """Checksum of `checksums.json`; empty during an attempt, and of runs without it."""
    updated: str = ""
    """UTC, ISO 8601."""


_FIELDS = tuple(field.name for field in fields(Status))
SHAPE: Shape = {"state": str, "reason": str, "attempt": int, "keeper": str} | {
    f"{field.name}?": type(field.default) for field in fields(Status)[4:]
}


def read(run: Path) -> Status | None:
    """None for a run that was never started. Raises `StoreError`: the file is damaged."""
    raw = read_json(run / FILE, SHAPE)
    if raw is None:
        return None
    try:
        age_s(raw.get("updated", ""))
        raw.setdefault("wandb", raw.get("mirror", ""))  # as versions before named it
        known = {name: raw[name] for name in _FIELDS if name in raw}  # a newer version may have written more
        return Status(**{**known, "state": State(raw["state"]), "keeper": Keeper(raw["keeper"])})
    except (TypeError, ValueError) as error:
        raise StoreError(f"{run / FILE} is damaged ({error}); without it the run counts as never started") from error


def age_s(updated: str) -> float:
    """Seconds since a status was written; infinite if unknown. Raises `ValueError` or `TypeError`."""
    return (datetime.now(UTC) - datetime.fromisoformat(updated)).total_seconds() if updated else math.inf


def write(run: Path, status: Status) -> Status:
    """Move the run to `status.state`; returns the written status.

    Allowed are `MOVES` within one attempt, or a restart by a newer attempt. A late message from an older attempt
    changes nothing. Raises `StoreError`: no such move.
    """
    with held(run / WRITE_LOCK):
        present = read(run)
        if present is not None and status.attempt < present.attempt:
            return present
        begins = present is None or (status.attempt > present.attempt and status.state in RESTARTS)
        if present is not None and not begins and status.state not in MOVES[present.state]:
            valid = ", ".join(sorted(MOVES[present.state]))
            raise StoreError(
                f"{run} is {present.state} and cannot become {status.state}; from there it can become {valid}"
            )
        return _store(run, replace(status, checksums="") if status.state in RESTARTS else status)


def move(run: Path, attempt: int, state: State, reason: str, **changes: object) -> Status:
    """`write` of the present status with another state and reason (and `changes`), for others than the starter.

    Raises `StoreError`: the run was never started, or there is no such move.
    """
    present = read(run)
    if present is None:
        raise StoreError(f"{run} has no status; it was never started")
    fields = {"state": state, "reason": reason, "attempt": attempt, **changes}
    return write(run, replace(present, **fields))  # type: ignore[arg-type]


def note(run: Path, **changes: object) -> None:
    """Add facts to the present status, in any state; no-op if never started."""
    with held(run / WRITE_LOCK):
        present = read(run)
        if present is not None:
            _store(run, replace(present, **changes))  # type: ignore[arg-type] # fields by name, of several types


def note_job(run: Path, attempt: int, job: str) -> None:
    with held(run / WRITE_LOCK):
        present = read(run)
        if present is None or present.attempt != attempt:
            return
        reason = f"in SLURM's queue as job {job}" if present.state is State.queued else present.reason
        _store(run, replace(present, job=job, reason=reason))


def _store(run: Path, status: Status) -> Status:
    stamped = replace(status, updated=datetime.now(UTC).isoformat(timespec="milliseconds"))
    write_json(run / FILE, asdict(stamped))
    return stamped


JobProbe = Callable[[Status], "tuple[State, str] | None"]
"""State and reason of a submitted run by the scheduler; None where it cannot be asked."""


def effective(run: Path, jobs: JobProbe | None = None) -> Status | None:
    """Effective state: that of the file, unless its owner is gone. Nothing is written.

    Args: jobs: scheduler; without it a submitted run is believed.
    """
    status = read(run)
    if status is None or status.state not in MOVING:
        return status
    if status.keeper is Keeper.slurm:
        answer = jobs(status) if jobs else None
    else:
        is_alive = status.state is State.preempted or is_held(run / OWNER_LOCK)
        answer = None if is_alive else (State.lost, f"its process on {status.host or 'this host'} is gone")
    if answer is None:
        return status
    newest = read(run)
    if newest != status:  # it moved on while its owner was looked for
        return newest
    return replace(status, state=answer[0], reason=answer[1])
