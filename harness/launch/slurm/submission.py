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
from harness.config.schema import Backend, Device, SharpAxis
from harness.launch.local.run import Ended
from harness.launch.opening import Action, Decision, Opened, Sources, code_copy, look, open_attempt
from harness.launch.slurm.scheduler import NoAnswer, ask, max_array_size
from harness.launch.slurm.task import write_tasks
from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import Lock, private_folder, write_atomic
from harness.store.provenance import python_path
from harness.store.rank_place import FOREIGN, is_slurm_step
from harness.store.reading import read_text
from harness.store.rundir import RunDir, Store, request_cancel
from harness.store.screen import counted
from harness.store.status import SUBMISSIONS, JobProbe, Keeper, State, Status

OF_SLURM = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_")
OF_THE_SITE = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})

OnDecision = Callable[[Cell, Decision], None]


def is_remote(cell: Cell) -> bool:
    return bool(cell.config["cluster"]["backend"] == Backend.slurm.name)


def submit_cells(
    store: Store, cells: Sequence[Cell], sources: Sources, jobs: JobProbe | None, on_decision: OnDecision
) -> list[str]:
    """Submit cells that are neither done nor in use, without waiting; a description of each array.

    Raises `StoreError`: sbatch refused; the cells of that array have failed, with its message.
    """
    submitted: list[str] = []
    for study in dict.fromkeys(cell.study for cell in cells):
        with store.study_lock(study):
            of_study = [cell for cell in cells if cell.study == study]
            decisions = [(cell, look(store, cell, sources.digest, jobs)) for cell in of_study]
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


def _submit(store: Store, batch: Batch, sources: Sources) -> str:
    opened = []
    for index, (cell, decision) in enumerate(batch.wanted):
        first = Status(State.queued, "being submitted", 0, Keeper.slurm, submission=batch.token, index=index)
        opened.append(open_attempt(store, cell, decision, sources, first))
    store.remember(opened[-1].run)
    private_folder(batch.folder)
    try:
        job = _sbatch(batch, opened)
    except Exception as error:
        raise _not_submitted(batch, opened, error) from error
    for index, one in enumerate(opened):
        status.note_job(one.run.path, one.attempt, f"{job}_{index}" if len(opened) > 1 else job)
    return f"{counted(len(opened), 'cell')} as SLURM job {job}"


_NO_ANSWER = re.compile(r"timed out|timeout|zero bytes were transmitted|connection (reset|refused)", re.IGNORECASE)


def _not_submitted(batch: Batch, opened: Sequence[Opened], error: Exception) -> StoreError:
    folder, words = f"\n(folder of the submission: {batch.folder})", str(error).removeprefix("sbatch: ").strip()
    if isinstance(error, NoAnswer) or _NO_ANSWER.search(words):
        message = f"sbatch had no answer: {words}; in a minute it shows whether SLURM took the jobs, then ask again"
        return StoreError(message + folder)
    message = f"not submitted: {words}" if isinstance(error, OSError) else f"sbatch refused: {words}"
    for one in opened:
        with suppress(OSError):  # of a disk that is full the next look tells: nothing of the run was submitted
            status.move(one.run.path, one.attempt, State.failed, message)
    return StoreError(message + folder)


def _sbatch(batch: Batch, opened: Sequence[Opened]) -> str:
    """Number of the job."""
    text, script = batch.script(), batch.folder / "submission.sh"
    for one in opened:
        write_atomic(one.run.attempt_dir(one.attempt) / "submit.sh", text)
    script.write_text(text, encoding="utf-8")  # not by `write_atomic`, which replaces secrets
    write_tasks(batch.folder, [(one.run.path, one.attempt) for one in opened])
    answer = ask("sbatch", str(script), environment=sbatch_environment(os.environ))
    job = re.search(r"\bjob (\d+)", answer)
    if job is None:
        raise NoAnswer(f"sbatch: no number of a job in {answer!r}")
    return job[1]


def sbatch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that sbatch would believe before the script: the user's, and those of a surrounding
    job."""
    return {
        name: value
        for name, value in environment.items()
        if name in OF_THE_SITE or not (name in FOREIGN or name.startswith(OF_SLURM))
    }


Wanted = Sequence[tuple[Cell, Decision]]
UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Batch:
    """Cells of one study and shape of resources, an array."""

    wanted: Wanted
    token: str
    """Unique token of a submission: hash of the root, the cells and their attempts."""
    root: Path
    code: Path
    """Folder whose `harness` the jobs run."""

    @property
    def folder(self) -> Path:
        return self.root / self.wanted[0][0].study / SUBMISSIONS / self.token

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of submitit for SLURM."""
        cell, count = self.wanted[0][0], len(self.wanted)
        asked, network = cell.config["cluster"], _network(cell)
        flags = dict.fromkeys((flag.replace("_", "-") for flag in asked["flags"]), True)
        further = {key.replace("_", "-"): value for key, value in sorted(asked["additional"].items())}
        memory = asked["mem_gb"]
        return {
            "job_name": f"{cell.study}-{self.token}",
            "nodes": asked["nodes"],
            "ntasks_per_node": _ranks_per_node(cell),
            "cpus_per_task": cpus_per_rank(asked),
            "gpus_per_node": asked["gpus_per_node"] or None,
            "mem": None if memory is None else f"{math.ceil(memory * 1024)}M" if memory else "0",
            **{name: asked[name] for name in ("partition", "account", "qos")},
            "time": asked["time_min"],
            "signal_delay_s": asked["grace_s"],
            "setup": [*asked["setup"], f"export PYTHONPATH={shlex.quote(str(self.code))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            # bash ends with its last command's exit code, and that must be the ranks'
            "teardown": ["ranks=$?", *asked["teardown"], "exit $ranks"] if asked["teardown"] else None,
            "wckey": None,  # submitit's own key is refused where keys are enforced
            "array_parallelism": asked["array_parallelism"] or UNLIMITED,
            "stderr_to_stdout": True,
            "additional_parameters": {"requeue": True} | ({"network": network} if network else {}) | further | flags,
            "srun_args": _srun_words(cell),
            **({"map_count": count} if count > 1 else {}),
        }

    def script(self) -> str:
        """The command of each rank has `-P`, which excludes the working directory's `harness`."""
        from submitit.slurm.slurm import _make_sbatch_string

        python = self.wanted[0][0].config["cluster"]["python"] or shlex.quote(sys.executable)
        command = f"{python} -P -u -m harness.launch.slurm.task {shlex.quote(str(self.folder))}"
        text: str = _make_sbatch_string(command=command, folder=self.folder, **self.parameters)
        return text


def batches(store: Store, wanted: Wanted, *, code: Path, limit: int) -> Iterator[Batch]:
    """One array for each study and shape, or several beyond `limit` cells.

    Args: wanted: cells in order of start. code: folder whose `harness` the jobs run.
    """
    alike: dict[str, list[tuple[Cell, Decision]]] = {}
    for cell, decision in wanted:
        shape = [cell.study, cell.config["cluster"], _ranks_per_node(cell), _network(cell)]
        alike.setdefault(json.dumps(shape, sort_keys=True), []).append((cell, decision))
    for pairs in alike.values():
        for start in range(0, len(pairs), limit):
            chunk = pairs[start : start + limit]
            attempts = [f"{cell.signature} {RunDir(store.path_of(cell)).next_attempt()}" for cell, _ in chunk]
            token = hashlib.sha256("\n".join([str(store.root), *attempts]).encode()).hexdigest()[:8]
            yield Batch(chunk, token, store.root, code)


def _ranks_per_node(cell: Cell) -> int:
    """From plain values, because typing a thousand cells takes a minute."""
    return int(cell.config["mesh"]["world_size"] // cell.config["cluster"]["nodes"])


def _srun_words(cell: Cell) -> list[str]:
    # srun takes no cpus-per-task from sbatch since 22.05; a rank that dies must take the step down; and where the
    # job began with no variables (additional: {export: NONE}) its ranks would lack PYTHONPATH, and run other code
    cluster = cell.config["cluster"]
    own = ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus_per_rank(cluster)}", "--export=ALL"]
    return [*own, *cluster["srun_args"]]


def _network(cell: Cell) -> str | None:
    sharp, cluster = cell.config["sharp"], cell.config["cluster"]
    wanted = SharpAxis[sharp["group"]].is_asked and sharp["infiniband"]
    return cluster["sharp_network"] if wanted and cluster["device"] == Device.cuda.name else None


# -- steps of an allocation --------------------------------------------------------------------------------------------


def in_allocation(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is in a SLURM job and is none of its ranks."""
    return "SLURM_JOB_ID" in environment and not is_slurm_step(environment)


def step_command(cell: Cell, folder: str) -> list[str]:
    cluster, ranks = cell.config["cluster"], _ranks_per_node(cell)
    python = [sys.executable] if cluster["python"] is None else shlex.split(cluster["python"])
    sizes = [f"--nodes={cluster['nodes']}", f"--ntasks={cluster['nodes'] * ranks}", f"--ntasks-per-node={ranks}"]
    return ["srun", *sizes, *_srun_words(cell), *python, "-P", "-u", "-m", "harness.launch.slurm.task", folder]


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
