"""Opening an attempt: look, decide and lock the run atomically. Order of starts: timed cells in blocks.

[Note: Blocks] A block is one repetition of each arm, in a random order of its own, so that drift affects every arm
alike; arms of one workload are adjacent, because they are compared. A cell's place follows from its configuration and
the seed, so that a resumed study keeps its order.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from harness.config import capabilities, own
from harness.config.compose import Cell
from harness.config.schema import MeasureMode, Rerun
from harness.launch.snapshot import own_copy
from harness.store import checksums, provenance, status
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.identity import repeated
from harness.store.rundir import CONFIG, RunDir, Store
from harness.store.status import RESTARTS, JobProbe, Keeper, State, Status

Action = Enum("Action", {"skip": "skip", "leave": "leave", "start": "start", "start_over": "start over"})
"""skip: the cell is done. leave: somebody runs it already, or will. start: a new attempt, from the newest checkpoint if
there is one. start_over: a new attempt from step 0; the earlier record is moved aside."""


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str

    @property
    def starts(self) -> bool:
        return self.action in (Action.start, Action.start_over)


def decide(status: Status | None, *, stale: bool, obstacle: str, rerun: Rerun) -> Decision:
    """Args: status: effective state (`status.effective`); None if never started. stale: sources that can change numbers
    have changed. obstacle: why an earlier attempt cannot be continued, or empty."""
    if status is None:
        return Decision(Action.start, "new")
    if status.state in RESTARTS or (status.state is State.preempted and status.job):
        return Decision(Action.leave, f"{status.state.value}: {status.reason}")
    if status.state is State.done:
        if rerun is Rerun.always:
            return Decision(Action.start_over, "done before, launch.rerun=always")
        if stale and rerun is Rerun.stale:
            return Decision(Action.start_over, "done by other sources, launch.rerun=stale")
        changed = ", but the sources changed since (launch.rerun=stale runs it again)" * stale
        return Decision(Action.skip, f"done{changed}")
    again = f"{status.state.value} before: {status.reason}"
    if obstacle:
        return Decision(Action.start_over, f"{again}; {obstacle}, so from step 0")
    return Decision(Action.start, again)


def in_blocks(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    others = [cell for cell in cells if not is_timed(cell)]
    return (*others, *sorted((cell for cell in cells if is_timed(cell)), key=_place))


def is_timed(cell: Cell) -> bool:
    return bool(cell.config["measure"]["mode"] == MeasureMode.bench.name)


def _place(cell: Cell) -> tuple[int, str, str]:
    block, seed = int(cell.config["train"]["replicate"]), int(cell.config["study"]["order_seed"])
    texts = (repeated(cell.config, ("engine", "sharding")), repeated(cell.config))
    workload, arm = (hashlib.sha256(f"{seed} {block} {text}".encode()).hexdigest() for text in texts)
    return block, workload, arm


@dataclass(frozen=True)
class Sources:
    facts: dict[str, object]
    diff: str

    @classmethod
    def gather(cls) -> Sources:
        facts = provenance.desk_facts(capabilities.PACKAGES)
        return cls(facts, provenance.git_diff(facts=facts["git"] or {}))

    @property
    def digest(self) -> str:
        return str(self.facts["sources_digest"])


@dataclass(frozen=True)
class Opened:
    cell: Cell
    run: RunDir
    attempt: int
    over: str = ""
    """Why it begins at step 0 despite an earlier attempt's progress; else empty."""


def look(store: Store, cell: Cell, sources: Sources, jobs: JobProbe | None) -> Decision:
    run = RunDir(store.path_of(cell))
    stale = provenance.is_stale(run.path, sources.digest, own.facts(cell.typed))
    obstacle = _obstacle(run, cell, stale) if run.has_record() else ""
    found = status.effective(run.path, jobs)
    return decide(found, stale=stale, obstacle=obstacle, rerun=Rerun[cell.config["launch"]["rerun"]])


def _obstacle(run: RunDir, cell: Cell, stale: bool) -> str:
    if stale:
        return "the sources changed since"
    if not (run.path / CONFIG).exists():
        what = f"{run.path} has the record of a run and no {CONFIG}"
        raise StoreError(f"{what}; put the file back, or remove the folder and request the run again")
    before, now = run.config()["cluster"], cell.config["cluster"]
    for key in ("threads_per_rank", "device"):  # the signature leaves the cluster out, but sums depend on these
        if before[key] != now[key]:
            return f"cluster.{key} was {before[key]}"
    ended = run.status()
    damaged = None if ended is None or ended.state is State.done else checksums.damage(run.path)
    return f"its record is damaged ({next(iter(damaged.values()))})" if damaged else ""


def open_attempt(store: Store, cell: Cell, decision: Decision, sources: Sources, first: Status) -> Opened:
    """Make the next attempt of a run and write its first status. The caller holds the study's lock.

    Args: decision: one that starts. first: initial status, without attempt number.
    """
    run = store.create(cell)
    attempt = run.new_attempt()
    run.adopt(cell)
    if decision.action is Action.start_over:
        run.start_over(attempt)
    mine = own.facts(cell.typed)
    if first.keeper is Keeper.slurm:  # a job starts later: from the files as they are now
        mine = [own_copy(store.root, each) for each in mine]
    provenance.record_start(run.path, {**sources.facts, "own": mine}, sources.diff)
    status.write(run.path, replace(first, attempt=attempt, steps=cell.config["train"]["steps"]))
    return Opened(cell, run, attempt, decision.why if decision.action is Action.start_over else "")


def open_here(store: Store, cell: Cell, sources: Sources, jobs: JobProbe | None) -> tuple[Opened, Lock] | Decision:
    """Open an attempt that this process runs, with the run's lock.

    Raises `StoreError`: somebody took the run between look and lock.
    """
    with store.study_lock(cell.study):
        decision = look(store, cell, sources, jobs)
        if not decision.starts:
            return decision
        lock = store.create(cell).lock()
        try:
            here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
            first = Status(State.running, f"starting ({decision.why})", 0, Keeper.process, **here)
            opened = open_attempt(store, cell, decision, sources, first)
            store.remember(opened.run)
            return opened, lock
        except BaseException:
            lock.release()
            raise
