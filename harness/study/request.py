"""A composed request -> cells, recorded as a study, and carried out; called by `run.py`, alone and under `-m`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from harness.config import catalog
from harness.config.compose import Cell, check_kinds
from harness.config.errors import refuse
from harness.config.overrides import check_overrides
from harness.config.schema import Backend, StudyConfig
from harness.launch.order import is_timed
from harness.launch.slurm.steps import in_allocation
from harness.store import commands
from harness.store.study import write_study
from harness.study.cells import Composer, Desired, desired
from harness.study.expand import expand
from harness.study.file import as_asked


def refuse_study(overrides: Sequence[str]) -> None:
    """Raises `BadRequest`: `study=X`, a set of cells, in a request for one cell."""
    chosen = [text for text in overrides if text.startswith("study=") and text != "study=null"]
    if chosen:
        raise refuse(
            chosen[0],
            "a study is a set of cells, and one is asked for",
            fix=commands.request(f"-m {shlex.quote(chosen[0])}"),
        )


def sweep(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str]) -> int:
    """Carry out a set of cells: a study, typed axes, or both; returns the exit code.

    It is recorded, so that its verdict knows every arm and its control. Raises `BadRequest`: violations of every cell,
    or no room on disk; nothing was started.
    """
    wanted = cells_of(loader, master, as_asked(arguments))
    first = wanted.cells[0].typed
    if not first.launch.dry_run:
        from harness.launch.room import check_room  # late: a refusal needs none of it, and stays quick

        check_room(wanted.cells)
    if any(text.startswith("study=") for text in arguments) and not first.launch.dry_run:
        typed = [*_own_options(), *as_asked(arguments)]
        write_study(Path(first.launch.root), wanted.cells, wanted.controls, typed)
    return carry_out(wanted.cells)


def _own_options() -> list[str]:
    own = catalog.own_folder()
    return [] if own is None or own == Path.cwd() / "conf" else [f"--config-dir={own}"]


def cells_of(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str]) -> Desired:
    words = check_overrides(arguments, multirun=True)
    for word in words:
        if word.key == "study" and len(word.values) > 1:
            raise refuse(word.text, "names several studies, and each has its own axes", fix=f"study={word.values[0]}")
    study = OmegaConf.to_object(master.study)
    assert isinstance(study, StudyConfig)
    check_kinds(study, "study")
    wanted = desired(expand(study, words), Composer(loader, master))
    _carried_out_as_one(wanted.cells)
    return wanted


SHARED = ("root", "dry_run", "wait", "fail_fast")


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
        raise refuse(
            "cluster=slurm measure=bench",
            "makes jobs that run at different times on different machines, and their step times cannot be compared",
            fix=f"salloc --nodes=N ... {commands.request('...')}: inside one allocation, cells are its steps",
        )


def carry_out(cells: Sequence[Cell]) -> int:
    """Preview or start cells; returns the exit code."""
    from harness.launch.submit import submit  # late: a refusal needs none of it, and stays quick

    return submit(cells)
