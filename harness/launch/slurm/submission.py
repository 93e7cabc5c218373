"""Submitting cells to SLURM, one array for each shape of resources.

A job array follows from its cells, their attempts and the code, so that `launch.dry_run=true` shows the same script.

A cell's status is queued, with a token that is also in the job's name, before sbatch is called. After a crash in
between, the next look finds the job by its name, or knows that there is none.

[Note: Why steps] Elements of an array run anywhere and any time, so their step times are not comparable. In an
allocation (salloc, or an sbatch script that calls run.py) each timed cell is a step over its nodes. The request stays
until the end; ranks write their own status, as in a job.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.config.derived import cpus_per_rank
from harness.config.errors import refuse
from harness.config.schema import Backend, Device, SharpAxis
from harness.launch.local.run import Ended
from harness.launch.opening import Action, Decision, Opened, Sources, look, open_attempt
from harness.launch.slurm.scheduler import Scheduler, SlurmError, ask, max_array_size
from harness.launch.slurm.task import write_tasks
from harness.launch.snapshot import code_copy
from harness.store import provenance, status
from harness.store.errors import StoreError
from harness.store.files import Lock, private_folder, write_atomic
from harness.store.provenance import python_path
from harness.store.rank_place import FOREIGN, is_slurm_step
from harness.store.reading import read_text
from harness.store.rundir import CODE_OF, DRY_RUN, RunDir, Store, request_cancel
from harness.store.status import SUBMISSIONS, JobProbe, Keeper, State, Status

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
            decisions = [(cell, look(store, cell, sources, jobs)) for cell in of_study]
            for cell, decision in decisions:
                if decision.action is not Action.start:
                    on_decision(cell, decision)
            if wanted := [(cell, decision) for cell, decision in decisions if decision.starts]:
                made = batches(store, wanted, code=code_copy(store.root, take=True), limit=max_array_size())
                submitted += [_submit(store, batch, sources) for batch in made]
    return submitted


def planned(store: Store, wanted: Wanted) -> list[Batch]:
    """Dry run of `submit_cells`, in its order."""
    return list(batches(store, wanted, code=code_copy(store.root, take=False), limit=max_array_size()))


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


Wanted = Sequence[tuple[Cell, Decision]]


@dataclass(frozen=True)
class Batch:
    study: str
    wanted: tuple[tuple[Cell, Decision], ...]
    token: str
    """Unique token of a submission: hash of the root, the cells and their attempts."""
    root: Path
    code: Path

    @property
    def folder(self) -> Path:
        return self.root / self.study / SUBMISSIONS / self.token

    @property
    def dry_file(self) -> Path:
        return self.root / self.study / DRY_RUN / f"{self.token}.sh"

    @property
    def parameters(self) -> dict[str, Any]:
        several = {"map_count": len(self.wanted)} if len(self.wanted) > 1 else {}
        return Shape(self.wanted[0][0]).parameters(f"{self.study}-{self.token}", self.code) | several

    def script(self) -> str:
        """The command of each rank has `-P`, which excludes the working directory's `harness`."""
        from submitit.slurm.slurm import _make_sbatch_string

        python = Shape(self.wanted[0][0]).python or shlex.quote(sys.executable)
        command = f"{python} -P -u -m harness.launch.slurm.task {shlex.quote(str(self.folder))}"
        text: str = _make_sbatch_string(command=command, folder=self.folder, **self.parameters)
        return text


def batches(store: Store, wanted: Wanted, *, code: Path, limit: int) -> Iterator[Batch]:
    """One array for each study and shape, or several beyond `limit` cells.

    Args: wanted: cells in order of start. code: folder whose `harness` the jobs run.
    """
    decisions = {cell.signature: decision for cell, decision in wanted}
    for cells in alike([cell for cell, _ in wanted]):
        for start in range(0, len(cells), limit):
            chunk = cells[start : start + limit]
            pairs = tuple((cell, decisions[cell.signature]) for cell in chunk)
            yield Batch(chunk[0].study, pairs, _token(store, chunk), store.root, code)


def _token(store: Store, cells: Sequence[Cell]) -> str:
    attempts: Mapping[str, int] = {cell.signature: RunDir(store.path_of(cell)).next_attempt() for cell in cells}
    text = "\n".join([str(store.root), *(f"{signature} {number}" for signature, number in attempts.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


UNLIMITED = 1_000_000


class Shape:
    """Resources of a cell, from plain values, because typing a thousand cells takes a minute."""

    def __init__(self, cell: Cell) -> None:
        cluster: dict[str, Any] = cell.config["cluster"]
        self.nodes: int = cluster["nodes"]
        self.ranks_per_node: int = cell.config["mesh"]["world_size"] // self.nodes
        self.cpus_per_rank = cpus_per_rank(cluster)
        self.python: str | None = cluster["python"]
        self._root: str = cell.config["launch"]["root"]
        self._network = _network(cell)
        self._cluster = cluster

    @property
    def key(self) -> str:
        """Equal for cells that fit into one array."""
        return json.dumps([self._cluster, self.ranks_per_node, self._network, self._root], sort_keys=True)

    def parameters(self, name: str, code: Path) -> dict[str, Any]:
        """Parameters of submitit for SLURM. Args: code: folder whose `harness` the job runs."""
        asked = self._cluster
        flags = dict.fromkeys((flag.replace("_", "-") for flag in asked["flags"]), True)
        further = {key.replace("_", "-"): value for key, value in sorted(asked["additional"].items())}
        memory = asked["mem_gb"]
        return {
            "job_name": name,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks_per_node,
            "cpus_per_task": self.cpus_per_rank,
            "gpus_per_node": asked["gpus_per_node"] or None,
            "mem": None if memory is None else f"{math.ceil(memory * 1024)}M" if memory else "0",
            **{name: asked[name] for name in ("partition", "account", "qos")},
            "time": asked["time_min"],
            "signal_delay_s": asked["grace_s"],
            "setup": [*asked["setup"], f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            # bash ends with its last command's exit code, and that must be the ranks'
            "teardown": ["ranks=$?", *asked["teardown"], "exit $ranks"] if asked["teardown"] else None,
            "wckey": None,  # submitit's own key is refused where keys are enforced
            "array_parallelism": asked["array_parallelism"] or UNLIMITED,
            "stderr_to_stdout": True,
            "additional_parameters": {
                "requeue": True,
                **({"network": self._network} if self._network else {}),
                **further,
                **flags,
            },
            "srun_args": self.srun_words(),
        }

    def srun_words(self) -> list[str]:
        # srun takes no cpus-per-task from sbatch since 22.05; a rank that dies must take the step down; and where the
        # job began with no variables (SBATCH_EXPORT=NONE) its ranks would lack PYTHONPATH, and run other code
        own = ["--kill-on-bad-exit=1", f"--cpus-per-task={self.cpus_per_rank}", "--export=ALL"]
        return [*own, *self._cluster["srun_args"]]


def _network(cell: Cell) -> str | None:
    sharp, cluster = cell.config["sharp"], cell.config["cluster"]
    wanted = SharpAxis[sharp["group"]].is_asked and sharp["infiniband"]
    return cluster["sharp_network"] if wanted and cluster["device"] == Device.cuda.name else None


def alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one study and shape together, in the order of the first of each."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.study + Shape(cell).key, []).append(cell)
    return list(groups.values())


# -- steps of an allocation --------------------------------------------------------------------------------------------

NODES = "SLURM_JOB_NUM_NODES"


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is in a SLURM job and is none of its ranks."""
    return "SLURM_JOB_ID" in environment and not is_slurm_step(environment)


def check_allocation(cells: Sequence[Cell], environment: Mapping[str, str] = os.environ) -> None:
    """Raises `BadRequest`: a cell needs more nodes than this allocation has."""
    count = environment.get(NODES, "1")
    if not count.isdecimal():
        raise refuse(f"{NODES}={count}", "is no number of nodes, as SLURM sets it", fix=f"unset {NODES}")
    have = int(count)
    most = max(cell.config["cluster"]["nodes"] for cell in cells)
    if most > have:
        problem = f"is more than this allocation's {have} node{'s' * (have != 1)}"
        raise refuse(f"cluster.nodes={most}", problem, fix=f"salloc --nodes={most}, or cluster.nodes={have}")


def step_command(cell: Cell, folder: str) -> list[str]:
    shape = Shape(cell)
    python = [sys.executable] if shape.python is None else shlex.split(shape.python)
    ranks = shape.ranks_per_node
    sizes = [f"--nodes={shape.nodes}", f"--ntasks={shape.nodes * ranks}", f"--ntasks-per-node={ranks}"]
    return ["srun", *sizes, *shape.srun_words(), *python, "-P", "-u", "-m", "harness.launch.slurm.task", folder]


def run_step(opened: Opened, lock: Lock) -> Ended:
    """Run an opened attempt as a step of this allocation.

    Raises `KeyboardInterrupt`: Ctrl-C; the step was ended, and the run is cancelled.
    """
    path, attempt = opened.run.path, opened.attempt
    folder = opened.run.attempt_dir(attempt)
    write_tasks(folder, [(path, attempt)])
    lock.release()  # rank 0 of a job takes the run's lock itself
    step = subprocess.Popen(
        step_command(opened.cell, str(folder)),
        env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is this request's, which says what it means
    )
    try:
        code = step.wait()
    except KeyboardInterrupt:
        request_cancel(path, attempt)
        step.terminate()
        step.wait()
        status.move(path, attempt, State.cancelled, "interrupted by Ctrl-C")
        raise
    present = opened.run.status()
    if present is None or present.state in (State.running, State.queued):
        reason = f"srun ended with code {code}, and no rank said why; logs: {folder}"
        status.move(path, attempt, State.failed, reason)
        return Ended(State.failed, reason)
    report = read_text(folder / "error.txt") if present.state is State.failed else None
    return Ended(present.state, present.reason, report or "")
