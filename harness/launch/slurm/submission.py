"""Submitting cells to SLURM: one array for each shape of resources, and back at once.

Order of bookkeeping: a cell's status says queued, with a token, before sbatch is called; the token is in the job's
name. Whatever dies between the two, the next look finds the job by its name, or knows that there is none.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.config.schema import Backend, Device, SharpAxis
from harness.launch.environment import python_path
from harness.launch.opening import Opened, Sources, look, open_attempt
from harness.launch.plan import Decision
from harness.launch.slurm.scheduler import max_array_size, probe
from harness.launch.slurm.task import Task
from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import write_atomic
from harness.store.placement import FOREIGN
from harness.store.rundir import Store
from harness.store.status import JobProbe, Keeper, State, Status

__all__ = ["Array", "Shape", "is_remote", "probe", "script", "shapes", "submit_cells"]

SUBMISSIONS = ".submit"
OF_THE_USER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})
"""SLURM's variables that belong to no job."""


@dataclass(frozen=True)
class Shape:
    """What cells must share to stand in one array."""

    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    gpus_per_node: int
    mem_gb: float | None
    partition: str | None
    account: str | None
    qos: str | None
    time_min: int
    grace_s: int
    network: str | None
    setup: tuple[str, ...]
    additional: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cell: Cell) -> Shape:
        """The shape of a cell. Read from its plain values: typing a thousand cells takes a minute."""
        cluster = cell.config["cluster"]
        same = (
            "nodes",
            "threads_per_rank",
            "gpus_per_node",
            "mem_gb",
            "partition",
            "account",
            "qos",
            "time_min",
            "grace_s",
        )
        return cls(
            ranks_per_node=cell.config["mesh"]["world_size"] // cluster["nodes"],
            network=_network(cell),
            setup=tuple(cluster["setup"]),
            additional=tuple(sorted(cluster["additional"].items())),
            **{name: cluster[name] for name in same},
        )

    def parameters(self, name: str) -> dict[str, Any]:
        """What this shape is in submitit's parameters for SLURM."""
        return {
            "job_name": name,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks_per_node,
            "cpus_per_task": self.threads_per_rank,
            "gpus_per_node": self.gpus_per_node or None,
            "mem": None if self.mem_gb is None else f"{round(self.mem_gb * 1024)}M",
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time_min,
            "signal_delay_s": self.grace_s,
            "setup": [*self.setup, f"export PYTHONPATH={shlex.quote(python_path({}))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            "wckey": None,  # submitit's own key is refused where keys are enforced
            "array_parallelism": 1_000_000,
            "stderr_to_stdout": True,
            "additional_parameters": {
                "requeue": True,
                **({"network": self.network} if self.network else {}),
                **dict(self.additional),
            },
            # srun takes no cpus-per-task from sbatch since 22.05; a rank that dies must take the step down
            "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={self.threads_per_rank}"],
        }


def _network(cell: Cell) -> str | None:
    """What --network asks for; the switches give no SHARP tree to a job that did not ask."""
    sharp, cluster = cell.config["sharp"], cell.config["cluster"]
    wanted = sharp["group"] != SharpAxis.none.name and sharp["infiniband"]
    return cluster["sharp_network"] if wanted and cluster["device"] == Device.cuda.name else None


@dataclass(frozen=True)
class Array:
    """Cells that were submitted together."""

    jobs: tuple[str, ...]
    runs: tuple[Path, ...]

    def describe(self) -> str:
        """`4 cells as SLURM job 123`."""
        main = self.jobs[0].partition("_")[0]
        return f"{len(self.runs)} cell{'s' * (len(self.runs) > 1)} as SLURM job {main}"


def is_remote(cell: Cell) -> bool:
    """Whether SLURM runs this cell."""
    return bool(cell.config["cluster"]["backend"] == Backend.slurm.name)


def shapes(cells: Sequence[Cell]) -> dict[Shape, list[Cell]]:
    """Cells by shape, in their order."""
    groups: dict[Shape, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(Shape.of(cell), []).append(cell)
    return groups


def submit_cells(
    store: Store,
    cells: Sequence[Cell],
    sources: Sources,
    jobs: JobProbe | None,
    *,
    on_decision: Callable[[Cell, Decision], None],
) -> list[Array]:
    """Submit the cells that are neither done nor in somebody's hands; does not wait for them.

    Raises:
        StoreError: sbatch refused; the cells of that array are failed, with its words as their reason.
    """
    submitted: list[Array] = []
    for study in dict.fromkeys(cell.study for cell in cells):
        with store.study_lock(study):
            wanted = _wanted(store, [cell for cell in cells if cell.study == study], sources, jobs, on_decision)
            for shape, group in shapes([cell for cell, _ in wanted]).items():
                decisions = {cell.signature: decision for cell, decision in wanted}
                chunks = _chunks(group, max_array_size())
                submitted += [_submit(store, study, shape, chunk, decisions, sources) for chunk in chunks]
    return submitted


def _wanted(
    store: Store,
    cells: Sequence[Cell],
    sources: Sources,
    jobs: JobProbe | None,
    on_decision: Callable[[Cell, Decision], None],
) -> list[tuple[Cell, Decision]]:
    wanted = []
    for cell in {cell.signature: cell for cell in cells}.values():
        decision = look(store, cell, sources, jobs)
        if decision.starts:
            wanted.append((cell, decision))
        else:
            on_decision(cell, decision)
    return wanted


def _chunks(cells: list[Cell], size: int) -> Iterator[list[Cell]]:
    for start in range(0, len(cells), size):
        yield cells[start : start + size]


def _submit(
    store: Store, study: str, shape: Shape, cells: list[Cell], decisions: dict[str, Decision], sources: Sources
) -> Array:
    token = secrets.token_hex(4)
    opened = [
        open_attempt(store, cell, decisions[cell.signature], sources, _first_status(token, index))
        for index, cell in enumerate(cells)
    ]
    folder = store.root / study / SUBMISSIONS / token
    folder.mkdir(parents=True)
    try:
        jobs = _sbatch(folder, shape, f"{study}-{token}", opened)
    except Exception as error:
        reason = f"sbatch refused: {_words_of(error)}"
        for one in opened:
            status.move(one.run.path, one.attempt, State.failed, reason)
        raise StoreError(f"{reason}\n(folder of the submission: {folder})") from error
    for one, job in zip(opened, jobs, strict=True):
        status.note_job(one.run.path, one.attempt, job)
    return Array(tuple(jobs), tuple(one.run.path for one in opened))


def _first_status(token: str, index: int) -> Status:
    return Status(State.queued, "being submitted", 0, Keeper.slurm, submission=token, index=index)


def _sbatch(folder: Path, shape: Shape, name: str, opened: Sequence[Opened]) -> list[str]:
    import submitit

    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(**shape.parameters(name))
    with outside_any_job():
        jobs = executor.submit_array([Task(str(one.run.path), one.attempt) for one in opened])
    text = script(folder, shape, name, len(opened))
    for one in opened:
        write_atomic(one.run.attempt_dir(one.attempt) / "submit.sh", text)
    return [job.job_id for job in jobs]


@contextmanager
def outside_any_job() -> Iterator[None]:
    """Hide a surrounding job's variables: sbatch would take its node counts and memory for the new job's."""
    before = dict(os.environ)
    if "SLURM_JOB_ID" in before:
        for name in before:
            if name in FOREIGN or (name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in OF_THE_USER):
                del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


def script(folder: Path, shape: Shape, name: str, count: int) -> str:
    """The batch script of an array of `count` cells, as submitit writes it; needs no SLURM."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    text: str = _make_sbatch_string(
        command=command, folder=folder, map_count=count if count > 1 else None, **shape.parameters(name)
    )
    return text


def _words_of(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr or error.output or ""
        return (output.decode(errors="replace") if isinstance(output, bytes) else str(output)).strip()
    return str(error).strip()
