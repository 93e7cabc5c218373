"""Opening an attempt: look, decide and lock the run atomically. Order of starts: timed cells in blocks.

[Note: Blocks] A block is one repetition of each arm, in a random order of its own, so that drift affects every arm
alike; arms of one workload are adjacent, because they are compared. A cell's place follows from its configuration and
the seed, so that a resumed study keeps its order.

The code is copied at submission, so that later edits do not affect waiting jobs.

`<root>/.snapshots/<digest>/` holds the shipped files by content: cells of the same sources share a copy, and a requeued
job uses it again. The user's own classes are copied likewise. `harness gc` removes unused copies.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from harness.config import capabilities, own
from harness.config.compose import Cell
from harness.config.schema import MeasureMode, Rerun
from harness.store import checksums, provenance, status
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.identity import repeated
from harness.store.provenance import PACKAGE, files_digest
from harness.store.rundir import CODE, CONFIG, RunDir, Store
from harness.store.status import RESTARTS, JobProbe, Keeper, State, Status

SHIPPED = ("harness", "hydra_plugins/harness_hydra", "conf", "sweeps", "run.py")


def code_copy(root: Path, origin: Path = PACKAGE.parent, *, take: bool) -> Path:
    """Folder of a copy of the code as it is. Args: take: make it, unless present.

    Raises `OSError`: the root is not writable, or the disk is full.
    """
    names = sorted(name for shipped in SHIPPED for name in _files(origin, shipped))
    target = root / CODE / files_digest(origin, names)[:16]
    return copied(origin, names, target) if take else target


def own_copy(root: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Record of a user's own class for `provenance.json`, with the folder of its copy as `copy`."""
    target = root / CODE / f"own-{facts['digest'][:16]}"
    return {**facts, "copy": str(copied(Path(facts["root"]), facts["files"], target))}


def copied(origin: Path, names: Sequence[str], target: Path) -> Path:
    """Atomically copy files to a folder named by their digest, unless it is there."""
    if target.is_dir():
        os.utime(target)  # in use: `gc` takes only what nobody has asked for lately
        return target
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin / name, temporary / name)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():  # somebody else has made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(origin: Path, name: str) -> Iterable[str]:
    if (origin / name).is_file():
        yield name
    for folder, folders, files in os.walk(origin / name):
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        for file in files:
            path = Path(folder, file)
            if not file.startswith(".") and path.is_file():
                yield path.relative_to(origin).as_posix()


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


def look(store: Store, cell: Cell, sources_digest: str, jobs: JobProbe | None) -> Decision:
    run = RunDir(store.path_of(cell))
    stale = provenance.is_stale(run.path, sources_digest, own.facts(cell.typed))
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
        decision = look(store, cell, sources.digest, jobs)
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
