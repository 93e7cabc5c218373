"""A composed request -> cells, recorded as a study, and carried out; called by `run.py`, alone and under `-m`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.config import catalog
from harness.config.catalog import STUDIES, file_of
from harness.config.compose import Cell, compose_cell, hydra_begun, plain
from harness.config.errors import BadRequest, refuse
from harness.config.hydra_settings import check_hydra, demand_training
from harness.config.overrides import Word, check_overrides, hydra_words
from harness.config.schema import Backend, StudyConfig
from harness.config.typed import load_config
from harness.launch.opening import is_timed
from harness.launch.slurm.submission import in_allocation
from harness.store import commands
from harness.store.metrics import tail
from harness.store.rundir import RunDir, Store
from harness.store.study import write_study
from harness.study.cells import Composer, Desired, as_asked, desired, expand, register as register_study


def refuse_study(overrides: Sequence[str]) -> None:
    """Raises `BadRequest`: `study=X`, a set of cells, in a request for one cell."""
    chosen = [text for text in overrides if text.startswith("study=") and text != "study=null"]
    if chosen:
        fix = commands.request(f"-m {shlex.quote(chosen[0])}")
        raise refuse(chosen[0], "a study is a set of cells, and one is asked for", fix=fix)


Launch = Callable[[Sequence[Sequence[str]]], None]
"""Carries out jobs, the overrides of a cell each, by a launcher of Hydra's."""


def sweep(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str], launch: Launch) -> int:
    """Carry out a set of cells: a study, typed axes, or both; returns the exit code.

    It is recorded, so that its verdict knows every arm and its control. Raises `BadRequest`: violations of every cell;
    nothing was started.
    """
    check_hydra(master.hydra, multirun=True)
    wanted = cells_of(loader, master, as_asked(arguments))
    first = wanted.cells[0].typed
    if any(text.startswith("study=") for text in arguments) and not first.launch.dry_run:
        own = catalog.own_folder()
        options = [] if own is None or own == Path.cwd() / "conf" else [f"--config-dir={own}"]
        typed = [*options, *as_asked(arguments)]
        write_study(Path(first.launch.root), wanted.cells, wanted.controls, typed)
    if _is_basic(master.hydra) or first.launch.dry_run:
        return carry_out(wanted.cells)
    for cell in wanted.cells:
        _not_timed(cell, master.hydra)
    launch([hydra_words(cell.overrides) for cell in wanted.cells])
    return 0


class JobFailed(Exception):
    """A cell that a sweeper or launcher of Hydra's asked for did not end well.

    Args: its exit code, and the message.
    """

    def __str__(self) -> str:
        return str(self.args[1])


def run_job(cfg: DictConfig) -> float | None:
    """One job of a sweeper or launcher of Hydra's: freeze the cell, carry it out, return its objective.

    The objective is None where nothing was trained here: a dry run, or a job on SLURM that is not waited for.

    Raises `BadRequest`: the cell; or it has no number of the name `study.objective`. `JobFailed`.
    """
    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":  # in a process of the launcher's nobody has read --config-dir
            catalog.choose_own_folder(source.path)
    check_hydra(hydra, multirun=True)
    cell = compose_cell(cfg, list(hydra.overrides.task))
    _not_timed(cell, hydra)
    if cell.typed.launch.dry_run:
        demand_training(str(hydra.runtime.choices["hydra/sweeper"]))
    code = carry_out([cell])
    run = RunDir(Store(cell.config["launch"]["root"]).path_of(cell))
    if code:
        look = commands.verb(f"show {shlex.quote(str(run.path))}")
        raise JobFailed(code, f"{run.path}: not done (exit code {code}); {look}")
    if cell.typed.launch.dry_run or not run.summary.exists() or not (records := tail(run.metrics)):
        return None
    name = cell.typed.study.objective
    numbers = {key: value for key, value in records[-1].items() if isinstance(value, int | float)}
    if name not in numbers:
        choices = ", ".join(sorted(numbers))
        raise refuse(f"study.objective={name}", "is no number of a step's record", choices=choices)
    return float(numbers[name])


def _is_basic(hydra: Any) -> bool:
    return str(hydra.launcher.get("_target_", "")).endswith(".BasicLauncher")


def _not_timed(cell: Cell, hydra: Any) -> None:
    if is_timed(cell) and not _is_basic(hydra):
        problem = "beside cells that a launcher of Hydra's runs at the same time, step times cannot be compared"
        fix = "leave hydra/launcher out: timed cells then run one after another, in blocks"
        raise refuse("measure=bench", problem, fix=fix)


def cells_asked(words: Sequence[str]) -> tuple[Cell, ...]:
    """Cells of a request, a study's too, outside `run.py`; nothing is started.

    Raises `BadRequest`, as `run.py` does.
    """
    check_overrides(words, multirun=True)
    register_study(words)
    with hydra_begun() as path:
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", [*hydra_words(words), *path], RunMode.MULTIRUN)
        return cells_of(loader, master, as_asked([*words, "launch.dry_run=true"])).cells


def cells_of(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str]) -> Desired:
    words = check_overrides(arguments, multirun=True)
    for word in words:
        if word.key == "study" and len(word.values) > 1:
            raise refuse(word.text, "names several studies, and each has its own axes", fix=f"study={word.values[0]}")
    wanted = desired(expand(_study(master, words), words), Composer(loader, master))
    _carried_out_as_one(wanted.cells)
    return wanted


def _study(master: DictConfig, words: Sequence[Word]) -> StudyConfig:
    """Raises `BadRequest`, naming the study's file: a key or value of it is wrong."""
    try:
        return load_config({"study": plain(master.study)}).study
    except BadRequest as error:
        names = [word.values[0] for word in words if word.key == "study"]
        file = f"{file_of(STUDIES, names[0])}: " if names else ""
        raise BadRequest(replace(each, subject=f"{file}{each.subject}") for each in error.violations) from None


SHARED = ("root", "dry_run", "wait")


def _carried_out_as_one(cells: Sequence[Cell]) -> None:
    """Raises `BadRequest`: cells differ in how they are carried out, or several are to run inside this process."""
    for key in SHARED:
        values = {str(cell.config["launch"][key]) for cell in cells}
        if len(values) > 1:
            shown = " and ".join(sorted(values))
            raise refuse(f"launch.{key}", f"is {shown} in one request", fix="one value, or two requests")
    if len(cells) > 1 and any(cell.config["launch"]["inline"] for cell in cells):
        raise refuse("launch.inline=true", f"runs one cell, and {len(cells)} are asked for", fix="leave -m out")
    remote = any(is_timed(cell) and cell.typed.cluster.backend is Backend.slurm for cell in cells)
    if len(cells) > 1 and remote and not in_allocation() and not cells[0].typed.launch.dry_run:
        problem = "makes jobs that run at different times on different machines: step times cannot be compared"
        fix = f"salloc --nodes=N ... {commands.request('...')}: inside one allocation, cells are its steps"
        raise refuse("cluster=slurm measure=bench", problem, fix=fix)


def carry_out(cells: Sequence[Cell]) -> int:
    """Preview or start cells; returns the exit code."""
    from harness.launch.submit import submit  # late: a refusal needs none of it, and stays quick

    return submit(cells)
