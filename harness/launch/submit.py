"""Carrying out a request: every cell on its own cluster, then the next commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.config.compose import Cell
from harness.launch import preview
from harness.launch.local.pool import Pool, exit_code
from harness.launch.local.run import EXIT_CODES, Ended, run_inline
from harness.launch.opening import Opened, Sources, open_here
from harness.launch.plan import Action, Decision, is_timed
from harness.launch.slurm import scheduler, steps, submission
from harness.launch.terminal import RunDisplay, Terminal
from harness.launch.watch import wait_for
from harness.store import commands, screen
from harness.store.errors import EXIT_BUSY
from harness.store.files import Lock
from harness.store.labels import named
from harness.store.rank_place import stop_signals_blocked
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from harness.store.study import judging_verb

Listener = Callable[[dict[str, Any]], None]
PREEMPTED = EXIT_CODES[State.preempted]


def submit(cells: Sequence[Cell], terminal: Terminal | None = None) -> int:
    """Run, submit, or preview cells; returns the exit code of the request.

    Local cells run in the foreground, side by side within the slots. SLURM cells are submitted in arrays, without
    waiting unless launch.wait. Done and running cells are not started.

    Raises `StoreError`: a run is in use or damaged; nothing of this cell was started. `OSError`: the store cannot be
    written.
    """
    if any(cell.config["launch"]["dry_run"] for cell in cells):
        print(preview.preview(cells))
        return 0
    return _Request(cells, terminal or Terminal()).carry_out()


class _Request:
    def __init__(self, cells: Sequence[Cell], terminal: Terminal) -> None:
        self._cells = cells
        self._terminal = terminal
        self._several = len(cells) > 1
        self._store = Store(cells[0].config["launch"]["root"])
        names = {cell.signature: self._store.path_of(cell).name for cell in cells}
        short = named(set(names.values()))
        self._labels = {signature: short[name] for signature, name in names.items()}
        self._sources = Sources.gather()
        self._jobs = scheduler.probe()
        self._submitted: Sequence[Cell] = ()

    def carry_out(self) -> int:
        local = [cell for cell in self._cells if not submission.is_remote(cell)]
        remote = [cell for cell in self._cells if submission.is_remote(cell)]
        here = [cell for cell in remote if is_timed(cell)] if steps.in_allocation() else []
        self._submitted = [cell for cell in remote if cell not in here]
        codes = self._submit(self._submitted) if self._submitted else []
        codes += self._run_steps(here) if here else []
        if len(local) == 1 and local[0].typed.launch.inline:
            with stop_signals_blocked():  # until the rank listens
                codes += self._run_one(local[0], run_inline)
        elif local:
            told = self._on_decision, self._on_start, self._on_end
            codes += Pool(self._store, self._sources, self._jobs, *told).run(local)
        code = exit_code(codes)
        for command in self._next(code):
            self._terminal.line(f"next: {command}")
        return code

    def _submit(self, cells: Sequence[Cell]) -> list[int]:
        of = self._store, cells, self._sources, self._jobs, self._on_decision
        for array in submission.submit_cells(*of):
            self._terminal.line(f"submitted {array.describe()}")
        if not any(cell.config["launch"]["wait"] for cell in cells):
            return []
        return wait_for([RunDir(self._store.path_of(cell)) for cell in cells], self._terminal)

    def _run_steps(self, cells: Sequence[Cell]) -> list[int]:
        steps.check_allocation(cells)
        codes: list[int] = []
        for cell in cells:
            codes += self._run_one(cell, lambda opened, lock, _: steps.run_step(opened, lock))
            if codes[-1:] == [PREEMPTED]:
                break
        return codes

    def _run_one(self, cell: Cell, run: Callable[[Opened, Lock, Listener], Ended]) -> list[int]:
        """Exit code of a cell that is run here and now; none if it is done."""
        opened = open_here(self._store, cell, self._sources, self._jobs)
        if isinstance(opened, Decision):
            self._on_decision(cell, opened)
            return [EXIT_BUSY] if opened.action is Action.leave else []
        ended = run(*opened, self._on_start(opened[0]))
        self._on_end(opened[0], ended)
        return [ended.exit_code]

    def _on_decision(self, cell: Cell, decision: Decision) -> None:
        self._terminal.settle(f"{self._place(cell)}{self._store.path_of(cell)}: {decision.why}")

    def _on_start(self, opened: Opened) -> Listener:
        world_size = opened.cell.typed.mesh.world_size
        if opened.over:
            self._terminal.settle(f"{self._place(opened.cell)}{opened.run.path}: {opened.over}")
        begun = f"{screen.counted(world_size, 'rank')}, attempt {opened.attempt}"
        label = self._place(opened.cell) + self._labels[opened.cell.signature] if self._several else ""
        if self._several and self._terminal.moving:
            self._terminal.update(f"{label}  {begun}")
        else:
            self._terminal.line(f"{self._place(opened.cell)}{opened.run.path}: {begun}")
        return RunDisplay(self._terminal, label)

    def _on_end(self, opened: Opened, ended: Ended) -> None:
        if ended.report:
            self._terminal.line(f"\n{ended.report}")
        logs = "" if ended.state is State.done else f" (logs: {opened.run.attempt_dir(opened.attempt)})"
        line = f"{self._place(opened.cell)}{opened.run.path}: {ended.state.value}, {ended.reason}{logs}"
        (self._terminal.settle if self._several else self._terminal.line)(line)

    def _place(self, cell: Cell) -> str:
        if not self._several:
            return ""
        return f"cell {list(self._labels).index(cell.signature) + 1} of {len(self._labels)}  "

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
