"""Groups and their options: files of `conf/` and `sweeps/`, and engines as code declares them; read without Hydra.

Files of a folder of the user's own (`./conf`, or that of `--config-dir`) are options of the same groups.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.capabilities import EngineName
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.schema import Config
from harness.store import provenance
from harness.store.reading import read_text
from harness.store.reading_yaml import read_yaml
from harness.store.shapes import Maybe

ROOT = provenance.ROOT
STUDIES = "study"
"""Group of studies: `sweeps/` here, `study/` in a folder of the user's own."""

STUDY_FILE = "from_file"
"""Hydra's name of the study that a request names (`study.cells.register`)."""

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


@functools.cache
def _beside(here: Path) -> Path | None:
    folder = here / "conf"
    holds = folder.is_dir() and not (folder / "config.yaml").exists()
    return folder if holds and any(_stems(folder / group) for group in _own_groups()) else None


def load_catalog() -> dict[str, tuple[str, ...]]:
    """Options by group, both sorted. Raises `BadRequest`: a user's option has the name of an existing one."""
    return _catalog(own_folder())


def file_of(group: str, name: str) -> Path:
    here = _shipped(group) / f"{name}.yaml"
    own = own_folder()
    return here if own is None or here.exists() else own / group / f"{name}.yaml"


def study_of(word: str) -> str | None:
    """Name of the study that `study=NAME` chooses; None of other words."""
    group, _, value = word.partition("=")
    name = value.strip().strip("'\"")
    return name if group == STUDIES and name in load_catalog()[STUDIES] else None


@functools.cache
def _catalog(own: Path | None) -> dict[str, tuple[str, ...]]:
    shipped = {group: _stems(_shipped(group)) for group in _own_groups()}
    shipped["engine"] = tuple({*shipped["engine"], *EngineName.__members__})
    added = {group: () if own is None else _stems(own / group) for group in shipped}
    hidden = [(group, name) for group, names in added.items() for name in names if name in shipped[group]]
    if hidden:
        raise BadRequest(
            Violation(
                f"{own}/{group}/{name}.yaml",
                f"has the name of an option that is here, {group}={name}, which would mean two things",
                fix=f"another name, such as {group}/my_{name}.yaml",
            )
            for group, name in hidden
        )
    return {group: tuple(sorted((*shipped[group], *added[group]))) for group in sorted(shipped)}


def is_declared(group: str, name: str) -> bool:
    """True for an engine that only code declares: its option says its name alone."""
    return group == "engine" and not file_of(group, name).exists()


def _shipped(group: str) -> Path:
    return ROOT / "sweeps" if group == STUDIES else ROOT / "conf" / group


@functools.cache
def _own_groups() -> tuple[str, ...]:
    return tuple(sorted({STUDIES, *(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())}))


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in folder.glob("*.yaml")))


EVERYTHING = frozenset((*NULLABLE, *Config.__dataclass_fields__))

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)
_OVERRIDE = re.compile(r"override /(\w+)(?:@\S+)?")


class Option(NamedTuple):
    """Values of an option, and the groups that Hydra must compose for its effects on them."""

    values: Mapping[str, Any]
    reach: frozenset[str]


def chosen_apart(chosen: Iterable[str]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Group and values of each option `GROUP=NAME` that acts on its own group alone, and on which no other acts."""
    options = {text: (text.partition("=")[0], read_option(*text.split("=", 1))) for text in chosen}
    reached = frozenset().union(*(option.reach for _, option in options.values()))
    return {text: (group, option.values) for text, (group, option) in options.items() if group not in reached}


def read_option(group: str, name: str) -> Option:
    """Option of a plain name; other words, files of another package and unusual defaults act on everything."""
    if group == STUDIES:
        return Option({}, frozenset((group,)))
    if name not in load_catalog().get(group, ()):
        return Option({}, EVERYTHING)
    if is_declared(group, name):
        return Option({"name": name}, frozenset())
    return _read(group, file_of(group, name))


@functools.cache
def _read(group: str, path: Path) -> Option:
    values, package = dict(read_yaml(path, Maybe(dict)) or {}), _PACKAGE.search(read_text(path) or "")
    lines = values.pop("defaults", ())
    if not (package or lines) and group in Config.__dataclass_fields__:
        return Option(values, frozenset())
    reach = frozenset((group, *(values if package else ())))
    if package and package[1] != "_global_":
        return Option({}, EVERYTHING)
    for line in lines if isinstance(lines, list) else [lines]:
        words, chosen = next(iter(line.items())) if isinstance(line, dict) else (line, None)
        override = _OVERRIDE.fullmatch(str(words))
        if override and isinstance(chosen, str):
            reach |= read_option(override[1], chosen).reach | {override[1]}
        elif line != "_self_":
            return Option({}, EVERYTHING)
    return Option({}, reach)
