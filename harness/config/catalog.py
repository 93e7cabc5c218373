"""Groups and their options: files of `conf/` and `sweeps/`, and engines as code declares them.

Files of a folder of the user's own (`./conf`, or that of `--config-dir`) are options of the same groups.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from harness.config.capabilities import EngineName
from harness.config.errors import BadRequest, Violation, refuse
from harness.store import provenance

ROOT = provenance.ROOT

STUDIES = "study"
"""Group of studies: `sweeps/` here; `study/` in a folder of the user's own, and in this checkout's `conf/`."""

STUDY_FILE = "from_file"
"""Hydra's name of the study that a request names (`study.expand.register`)."""

NULLABLE = ("study", "experiment", "debug")


_CHOSEN: list[Path] = []


def choose_own_folder(path: str) -> Path:
    """Use this folder of options in place of `./conf`.

    Raises `BadRequest`: no such folder, or no file of it is an option of a group.
    """
    folder, subject = Path(os.path.abspath(os.path.expanduser(path))), f"--config-dir {path}"
    shape = "DIR/GROUP/NAME.yaml, with GROUP one of " + ", ".join(_own_groups())
    if not folder.is_dir():
        raise refuse(subject, "is no folder", choices=shape)
    if not any(_stems(folder / group) for group in _own_groups()):
        raise refuse(subject, "holds no option of any group", choices=shape)
    _CHOSEN[:] = [folder]
    return folder


def own_folder() -> Path | None:
    """Folder of a user's own options, if any.

    A `./conf` with a `config.yaml` belongs to another program, and is ignored.
    """
    return _CHOSEN[0] if _CHOSEN else _beside(Path.cwd())


def study_path(value: str) -> Path | None:
    """Absolute path of the file that `study=VALUE` names, by path or by its name; else None."""
    bare = value.strip().strip("'\"")
    if "/" in bare or bare.endswith((".yaml", ".yml")):
        return Path(os.path.abspath(os.path.expanduser(bare)))
    folders = [folder / STUDIES for folder in (own_folder(), ROOT / "conf") if folder is not None]
    return next((file for each in (*folders, ROOT / "sweeps") if (file := each / f"{bare}.yaml").is_file()), None)


@functools.cache
def _beside(here: Path) -> Path | None:
    folder = here / "conf"
    holds = folder.is_dir() and not (folder / "config.yaml").exists()
    return folder if holds and any(_stems(folder / group) for group in _own_groups()) else None


def load_catalog() -> dict[str, tuple[str, ...]]:
    """Options by group, both sorted. Raises `BadRequest`: a user's option has the name of an existing one."""
    return _catalog(own_folder())


def file_of(group: str, name: str) -> Path:
    here = ROOT / "conf" / group / f"{name}.yaml"
    own = own_folder()
    return here if own is None or here.exists() else own / group / f"{name}.yaml"


@functools.cache
def _catalog(own: Path | None) -> dict[str, tuple[str, ...]]:
    shipped = {folder.name: _stems(folder) for folder in _folders()}
    shipped |= {STUDIES: _stems(ROOT / "sweeps")}
    shipped |= {"engine": tuple(sorted({*shipped["engine"], *EngineName.__members__}))}
    found = _with(shipped, ROOT / "conf", (STUDIES,))
    return dict(sorted((found if own is None else _with(found, own, _own_groups())).items()))


def _with(known: dict[str, tuple[str, ...]], folder: Path, groups: Iterable[str]) -> dict[str, tuple[str, ...]]:
    added = {group: _stems(folder / group) for group in groups}
    hidden = [(group, name) for group, names in added.items() for name in names if name in known[group]]
    if hidden:
        raise BadRequest(
            Violation(
                f"{folder / group / name}.yaml",
                f"has the name of an option that is here, {group}={name}, which would mean two things",
                fix=f"another name, such as {group}/my_{name}.yaml",
            )
            for group, name in hidden
        )
    return {group: tuple(sorted((*names, *added.get(group, ())))) for group, names in known.items()}


def _folders() -> list[Path]:
    return [path for path in (ROOT / "conf").iterdir() if path.is_dir()]


@functools.cache
def _own_groups() -> tuple[str, ...]:
    return tuple(sorted({*(folder.name for folder in _folders()), STUDIES}))


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in folder.glob("*.yaml")))
