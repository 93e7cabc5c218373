"""A composed request -> cells, recorded as a study, and carried out. What `run.py` calls, alone and under `-m`."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from harness.config.compose import Cell, compose_cell
from harness.config.errors import refuse
from harness.config.overrides import check_overrides
from harness.config.schema import StudyConfig
from harness.study.cells import Composer, Desired, desired
from harness.study.expand import expand


def one(cfg: DictConfig, overrides: Sequence[str]) -> int:
    """Carry out a request for one cell.

    Raises:
        BadRequest: as `compose_cell`, or a study was chosen, which is a set of cells.
    """
    chosen = [text for text in overrides if text.startswith("study=") and text != "study=null"]
    if chosen:
        raise refuse(chosen[0], "a study is a set of cells", fix=f"python run.py -m {chosen[0]} ...")
    return carry_out(Desired((compose_cell(cfg, overrides),), {}))


def sweep(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str]) -> int:
    """Carry out a request for a set of cells: a study, axes typed on the command line, or both.

    Raises:
        BadRequest: with the violations of every cell; nothing was started.
    """
    return carry_out(cells_of(loader, master, arguments))


def cells_of(loader: ConfigLoader, master: DictConfig, arguments: Sequence[str]) -> Desired:
    """The cells a `-m` request asks for, composed and checked."""
    words = check_overrides(arguments, multirun=True)
    for word in words:
        if word.key == "study" and len(word.values) > 1:
            raise refuse(word.text, "names several studies, and each has its own axes", fix=f"study={word.values[0]}")
    study = OmegaConf.to_object(master.study)
    assert isinstance(study, StudyConfig)
    return desired(expand(study, words), Composer(loader, master))


def carry_out(wanted: Desired) -> int:
    """Print or start the cells; returns the exit code."""
    raise NotImplementedError
