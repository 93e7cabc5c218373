"""Submitting cells to SLURM, one array for each shape of resources.

A cell's status is queued, with a token that is also in the job's name, before sbatch is called. After a crash in
between, the next look finds the job by its name, or knows that there is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.config.compose import Cell
from harness.config.schema import Backend
from harness.launch.opening import Opened, Sources, look, open_attempt
from harness.launch.plan import Action, Decision
from harness.launch.slurm.batch import Batch, Wanted, batches
from harness.launch.slurm.scheduler import Scheduler, SlurmError, ask, max_array_size
from harness.launch.slurm.task import write_tasks
from harness.launch.snapshot import code_copy
from harness.store import provenance, status
from harness.store.errors import StoreError
from harness.store.files import private_folder, write_atomic
from harness.store.rank_place import FOREIGN
from harness.store.rundir import CODE_OF, Store
from harness.store.status import JobProbe, Keeper, State, Status

OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_")
OF_THE_USER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})

UNASKED = frozenset({"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"})

OPTIONS = {"timelimit": "time", "mem-per-node": "mem", "mem-per-cpu": "mem", "mem-per-gpu": "mem"}

OnDecision = Callable[[Cell, Decision], None]


@dataclass(frozen=True)
class Array:
    jobs: tuple[str, ...]
    runs: tuple[Path, ...]

    def describe(self) -> str:
        main = self.jobs[0].partition("_")[0]
        return f"{len(self.runs)} cell{'s' * (len(self.runs) > 1)} as SLURM job {main}"


def is_remote(cell: Cell) -> bool:
    return bool(cell.config["cluster"]["backend"] == Backend.slurm.name)


def submit_cells(
    store: Store, cells: Sequence[Cell], sources: Sources, jobs: JobProbe | None, on_decision: OnDecision
) -> list[Array]:
    """Submit cells that are neither done nor in use, without waiting.

    Raises `StoreError`: sbatch refused; the cells of that array have failed, with its message.
    """
    submitted: list[Array] = []
    for study in dict.fromkeys(cell.study for cell in cells):
        with store.study_lock(study):
            of_study = [cell for cell in cells if cell.study == study]
            wanted = _wanted(store, of_study, sources, jobs, on_decision)
            if wanted:
                made = batches(store, wanted, code=code_copy(store.root, take=True), limit=max_array_size())
                submitted += [_submit(store, batch, sources) for batch in made]
    return submitted


def planned(
    store: Store, cells: Sequence[Cell], sources: Sources, jobs: JobProbe | None, on_decision: OnDecision
) -> list[Batch]:
    """Dry run of `submit_cells`, in its order."""
    wanted = _wanted(store, cells, sources, jobs, on_decision)
    return list(batches(store, wanted, code=code_copy(store.root, take=False), limit=max_array_size()))


def _wanted(
    store: Store, cells: Sequence[Cell], sources: Sources, jobs: JobProbe | None, on_decision: OnDecision
) -> Wanted:
    wanted = []
    for cell in {cell.signature: cell for cell in cells}.values():
        decision = look(store, cell, sources, jobs)
        if decision.starts:
            wanted.append((cell, decision))
        if decision.action is not Action.start:
            on_decision(cell, decision)
    return wanted


def _submit(store: Store, batch: Batch, sources: Sources) -> Array:
    opened = [
        open_attempt(store, cell, decision, sources, _first_status(batch.token, index))
        for index, (cell, decision) in enumerate(batch.wanted)
    ]
    store.remember(opened[-1].run)
    private_folder(batch.folder)
    try:
        write_atomic(batch.folder / CODE_OF, "".join(f"{name}\n" for name in _copies(batch, opened)))
        jobs = _sbatch(batch, opened)
    except Exception as error:
        jobs = _taken(batch, len(opened))
        if not jobs:
            raise _not_submitted(batch, opened, error) from error
    for one, job in zip(opened, jobs, strict=True):
        status.note_job(one.run.path, one.attempt, job)
    return Array(tuple(jobs), tuple(one.run.path for one in opened))


def _taken(batch: Batch, count: int) -> list[str]:
    """Jobs that SLURM has although sbatch failed, because its answer was lost.

    SLURM accepts an array in full, so one element gives all numbers; others may be forgotten already.
    """
    scheduler = Scheduler()
    try:
        found = [scheduler.job_of(_first_status(batch.token, index)) for index in range(count)]
    except SlurmError:
        return []
    number = next((job.main for job in found if job is not None), None)
    return [] if number is None else _numbers(number, count)


def _numbers(job: str, count: int) -> list[str]:
    return [f"{job}_{index}" for index in range(count)] if count > 1 else [job]


_NO_ANSWER = re.compile(r"timed out|timeout|zero bytes were transmitted|connection (reset|refused)", re.IGNORECASE)


def _not_submitted(batch: Batch, opened: Sequence[Opened], error: Exception) -> StoreError:
    folder, words = f"\n(folder of the submission: {batch.folder})", str(error).removeprefix("sbatch: ").strip()
    if _NO_ANSWER.search(words):
        message = f"sbatch had no answer: {words}; in a minute it shows whether SLURM took the jobs, then ask again"
        return StoreError(message + folder)
    message = f"not submitted: {words}" if isinstance(error, OSError) else f"sbatch refused: {words}"
    for one in opened:
        with suppress(OSError):  # of a disk that is full the next look tells: nothing of the run was submitted
            status.move(one.run.path, one.attempt, State.failed, message)
    return StoreError(message + folder)


def _copies(batch: Batch, opened: Sequence[Opened]) -> list[str]:
    own = {Path(each["copy"]).name for one in opened for each in provenance.read(one.run.path).get("own", ())}
    return [batch.code.name, *sorted(own)]


def _first_status(token: str, index: int) -> Status:
    return Status(State.queued, "being submitted", 0, Keeper.slurm, submission=token, index=index)


def _sbatch(batch: Batch, opened: Sequence[Opened]) -> list[str]:
    text, script = batch.script(), batch.folder / "submission.sh"
    for one in opened:
        write_atomic(one.run.attempt_dir(one.attempt) / "submit.sh", text)
    script.write_text(text, encoding="utf-8")  # not by `write_atomic`, which replaces secrets
    write_tasks(batch.folder, [(one.run.path, one.attempt) for one in opened])
    answer = ask("sbatch", str(script), environment=sbatch_environment(text, os.environ))
    job = re.search(r"\bjob (\d+)", answer)
    if job is None:
        raise SlurmError(f"sbatch: no number of a job in {answer!r}")
    return _numbers(job[1], len(opened))


def sbatch_environment(script: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those of a surrounding job, whose counts and memory sbatch would inherit, and those that
    override the script; those for options it leaves open (`SBATCH_ACCOUNT`) stay."""
    said = set(re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))
    inside = "SLURM_JOB_ID" in environment
    return {
        name: value
        for name, value in environment.items()
        if not (inside and (name in FOREIGN or (name.startswith(OF_A_JOB) and name not in OF_THE_USER)))
        and name not in UNASKED
        and _option(name) not in said
    }


def _option(variable: str) -> str:
    prefix, _, name = variable.partition("_")
    plain = name.lower().replace("_", "-")
    return OPTIONS.get(plain, plain) if prefix == "SBATCH" else ""
