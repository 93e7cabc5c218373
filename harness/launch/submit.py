"""Carrying out a request: every cell on its own cluster, then the next commands; or a preview (launch.dry_run=true).

Ends of runs, and new attempts of failed ones.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from harness.config.compose import Cell
from harness.config.derived import run_environment
from harness.config.errors import refuse
from harness.config.schema import Rerun
from harness.launch.local.ranks import rank_environment
from harness.launch.local.run import EXIT_CODES, Ended, exit_code, listening, run_here, run_inline
from harness.launch.opening import Action, Decision, Opened, Sources, in_blocks, is_timed, look, open_here
from harness.launch.slurm import submission
from harness.launch.slurm.scheduler import Scheduler, SlurmError, ask, probe
from harness.launch.terminal import Listener, RunDisplay, Terminal
from harness.launch.watch import wait_for
from harness.store import commands, provenance, screen, status
from harness.store.errors import EXIT_BUSY, Busy, StoreError
from harness.store.files import Lock, is_held
from harness.store.labels import named
from harness.store.rank_place import stop_signals_blocked
from harness.store.rundir import CONFIG, RunDir, Store, request_cancel
from harness.store.status import MOVING, OWNER_LOCK, Keeper, State, Status
from harness.store.study import judging_verb

PREEMPTED = EXIT_CODES[State.preempted]


def submit(cells: Sequence[Cell], terminal: Terminal | None = None) -> int:
    """Run, submit, or preview cells; returns the exit code of the request.

    Local cells run in the foreground, one after another. SLURM cells are submitted in arrays, without waiting unless
    launch.wait. Done and running cells are not started.

    Raises `StoreError`: a run is in use or damaged; nothing of this cell was started. `OSError`: the store cannot be
    written.
    """
    if any(cell.config["launch"]["dry_run"] for cell in cells):
        print(preview(cells))
        return 0
    return _Request(cells, terminal or Terminal()).carry_out()


class _Request:
    def __init__(self, cells: Sequence[Cell], terminal: Terminal) -> None:
        self._cells, self._terminal, self._several = cells, terminal, len(cells) > 1
        self._store = Store(cells[0].config["launch"]["root"])
        names = {cell.signature: self._store.path_of(cell).name for cell in cells}
        short = named(set(names.values()))
        self._labels = {signature: short[name] for signature, name in names.items()}
        self._sources = Sources.gather()
        self._jobs = probe()
        self._submitted: Sequence[Cell] = ()

    def carry_out(self) -> int:
        local = [cell for cell in self._cells if not submission.is_remote(cell)]
        remote = [cell for cell in self._cells if submission.is_remote(cell)]
        here = [cell for cell in remote if is_timed(cell)] if submission.in_allocation() else []
        self._submitted = [cell for cell in remote if cell not in here]
        codes = self._submit(self._submitted) if self._submitted else []
        codes += self._run_steps(here) if here else []
        if len(local) == 1 and local[0].typed.launch.inline:
            with stop_signals_blocked():  # until the rank listens
                codes += self._run_one(local[0], run_inline)
        elif local:
            codes += self._run_local(local)
        code = exit_code(codes)
        for command in self._next(code):
            self._terminal.line(f"next: {command}")
        return code

    def _run_local(self, cells: Sequence[Cell]) -> list[int]:
        """Among several cells, a damaged or failing one spoils no other."""
        codes: list[int] = []
        with listening() as asked:
            for cell in cells:
                if asked:
                    break
                try:
                    codes += self._run_one(cell, partial(run_here, asked=asked))
                except (StoreError, OSError) as error:
                    if not self._several:
                        raise
                    self._say(cell, f"not started: {error}")
                    codes.append(EXIT_BUSY if isinstance(error, Busy) else 1)
        return [*codes, 130 if signal.SIGINT in asked else 75] if asked else codes

    def _submit(self, cells: Sequence[Cell]) -> list[int]:
        told = lambda cell, decision: self._say(cell, decision.why)  # noqa: E731 - of each cell
        for array in submission.submit_cells(self._store, cells, self._sources, self._jobs, told):
            self._terminal.line(f"submitted {array}")
        if not any(cell.config["launch"]["wait"] for cell in cells):
            return []
        return wait_for([RunDir(self._store.path_of(cell)) for cell in cells], self._terminal)

    def _run_steps(self, cells: Sequence[Cell]) -> list[int]:
        codes: list[int] = []
        for cell in cells:
            codes += self._run_one(cell, lambda opened, lock, _: submission.run_step(opened, lock))
            if codes[-1:] == [PREEMPTED]:
                break
        return codes

    def _run_one(self, cell: Cell, run: Callable[[Opened, Lock, Listener], Ended]) -> list[int]:
        """Exit code of a cell that is run here and now; none if it is done."""
        opened = open_here(self._store, cell, self._sources, self._jobs)
        if isinstance(opened, Decision):
            self._say(cell, opened.why)
            return [EXIT_BUSY] if opened.action is Action.leave else []
        one = opened[0]
        ended = run(*opened, self._on_start(one))
        if ended.report:
            self._terminal.line(f"\n{ended.report}")
        logs = "" if ended.state is State.done else f" (logs: {one.run.attempt_dir(one.attempt)})"
        self._say(cell, f"{ended.state.value}, {ended.reason}{logs}")
        return [ended.exit_code]

    def _say(self, cell: Cell, text: str) -> None:
        self._terminal.line(f"{self._place(cell)}{self._store.path_of(cell)}: {text}")

    def _on_start(self, opened: Opened) -> Listener:
        if opened.over:
            self._say(opened.cell, opened.over)
        label = self._place(opened.cell) + self._labels[opened.cell.signature] if self._several else ""
        ranks = screen.counted(opened.cell.typed.mesh.world_size, "rank")
        self._say(opened.cell, f"{ranks}, attempt {opened.attempt}")
        return RunDisplay(self._terminal, opened.cell.typed.train.steps, label)

    def _place(self, cell: Cell) -> str:
        place = f"cell {list(self._labels).index(cell.signature) + 1} of {len(self._labels)}  "
        return place if self._several else ""

    def _next(self, code: int) -> list[str]:
        study = self._cells[0].study
        runs = [RunDir(self._store.path_of(cell)) for cell in self._cells]
        show = f"show {self._store.short(runs[0])}"
        ref = study if self._several else self._store.short(runs[0])
        if any(not cell.config["launch"]["wait"] for cell in self._submitted):
            verbs = [f"watch {study}", f"cancel {ref}"]
        elif code:
            verbs = [f"watch {study}" if self._several else show, f"retry {ref}"]
        elif self._several:
            judging = judging_verb(self._store, study, runs, show)
            verbs = [f"watch {study}", f"bench {study}" if any(map(is_timed, self._cells)) else judging]
        else:
            verbs = [show, f"watch {study}"]
        return [commands.verb(verb, self._store.root) for verb in verbs]


def preview(cells: Sequence[Cell]) -> str:
    """Cells with directories and decisions, then the environment, then the batch scripts; starts and writes nothing."""
    store = Store(cells[0].config["launch"]["root"])
    digest, jobs = provenance.sources_digest(), probe()
    decisions = {cell.signature: look(store, cell, digest, jobs) for cell in cells}
    remote = [(cell, decisions[cell.signature]) for cell in cells if submission.is_remote(cell)]
    wanted = [(cell, decision) for cell, decision in remote if decision.starts]
    batches = submission.planned(store, wanted) if remote else []
    parts = [f"{screen.counted(len(cells), 'cell')}; dry run: nothing is written, nothing is started"]
    for cell in cells:
        decision = decisions[cell.signature]
        parts.append(f"\n{store.path_of(cell)}\n    {decision.action.value}: {decision.why}")
        parts.extend(f"    {override}" for override in cell.overrides)
    if local := [cell for cell in cells if not submission.is_remote(cell)]:
        config = local[0].typed
        ranks = f"\nrank 0 of {config.mesh.world_size} on this machine (the others differ in RANK and LOCAL_RANK):\n"
        parts.append(ranks + _assignments(rank_environment(config, 0, start="TOKEN")))
    for batch in batches:
        variables = _assignments(run_environment(batch.wanted[0][0].typed))
        title = f"sbatch script of {screen.counted(len(batch.wanted), 'cell')}:"
        parts.append(f"\n{title}\n\n{batch.script()}\nin each rank:\n{variables}")
    return "\n".join(parts)


def _assignments(variables: dict[str, str]) -> str:
    return "\n".join(f"    {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))


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
    living = []
    for run in runs_of(store, ref):
        found = status.effective(run.path, scheduler)
        ended = found is not None and found.keeper is Keeper.process and found.state is State.preempted
        if found is not None and found.state in MOVING and not ended:
            living.append((run, found))
    if not living:
        terminal.line(f"nothing to cancel: no run of {ref} is queued or running")
        return 0
    if of_slurm := [(run, found) for run, found in living if found.keeper is Keeper.slurm]:
        _cancel_jobs(of_slurm, scheduler)
    ours = [(run, found) for run, found in living if found.keeper is Keeper.process]
    for run, found in ours:
        request_cancel(run.path, found.attempt)
    deadline, left = time.monotonic() + CANCEL_TIMEOUT_S, [run for run, _ in ours]
    while (left := [run for run in left if is_held(run.path / OWNER_LOCK)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for run, _ in living:
        terminal.line(f"{run.path}: {'does not end' if run in left else 'cancelled'}")
    return int(bool(left))


def _cancel_jobs(living: Sequence[tuple[RunDir, Status]], scheduler: Scheduler | None) -> None:
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
