"""Groups and their options: files of `conf/` and `sweeps/`, and engines as code declares them; read without Hydra.

Files of a folder of the user's own (`./conf`, or that of `--config-dir`) are options of the same groups.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.capabilities import EngineName
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.schema import Config
from harness.store import provenance
from harness.store.errors import StoreError
from harness.store.reading import read_text
from harness.store.reading_yaml import read_yaml
from harness.store.shapes import Maybe

ROOT = provenance.ROOT

STUDIES = "study"
"""Group of studies: `sweeps/` here; `study/` in a folder of the user's own, and in this checkout's `conf/`."""

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


EVERYTHING = frozenset(Config.__dataclass_fields__)

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


class Line(NamedTuple):
    """A line of a defaults list: `- name`, `- override /group@package: name`, `- optional group: [name, name]`.

    path: of a group, from the root; of an option where no names follow.
    """

    words: str
    path: str
    package: str
    names: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        return [f"{self.path}/{name}" for name in self.names] or [self.path]

    @property
    def group(self) -> str:
        return self.path if self.names else self.path.rpartition("/")[0]


@dataclass(frozen=True)
class OptionFile:
    path: Path
    group: str
    package: str
    values: Mapping[str, Any]
    lines: tuple[Line, ...] = ()
    problem: str = ""
    """Reason why the file cannot be read as a table; empty otherwise."""

    @property
    def table(self) -> dict[str, Any]:
        """Values by group."""
        return dict(self.values) if self.package == "_global_" else {self.package: self.values}


def read_file(path: Path, group: str) -> OptionFile:
    try:
        if not path.exists():
            raise StoreError(f"{path} leads nowhere")
        values, text = dict(read_yaml(path, Maybe(dict)) or {}), read_text(path) or ""
    except StoreError as error:
        return OptionFile(path, group, group, {}, problem=str(error))
    package = _PACKAGE.search(text)
    defaults = values.pop("defaults", None)
    lines = [_line(each, group) for each in defaults] if isinstance(defaults, list) else []
    return OptionFile(path, group, package[1] if package else group, values, tuple(lines))


def _line(entry: object, group: str) -> Line:
    words, names = next(iter(entry.items())) if isinstance(entry, dict) and entry else (str(entry), ())
    path, _, package = str(words).rpartition(" ")[2].partition("@")
    whole = path.lstrip("/") if path.startswith(("/", "hydra/")) else f"{group}/{path}"
    return Line(str(words), whole, package, tuple(map(str, names if isinstance(names, list | tuple) else [names])))


def files_of(group: str, name: str) -> list[OptionFile]:
    """File of an option, and those that its defaults choose, in turn."""
    study = study_path(name) if group == STUDIES else None
    found: dict[Path, OptionFile] = {}
    wanted = [(study or file_of(group, name), group)]
    while wanted:
        path, folder = wanted.pop()
        if path in found or (found and not path.is_file()):
            continue
        found[path] = read_file(path, folder)
        options = [each.removesuffix(".yaml").rpartition("/") for line in found[path].lines for each in line.options]
        wanted += [(file_of(where, option), where) for where, _, option in options]
    return [*found.values()]


@dataclass(frozen=True)
class Option:
    """Values of an option, and the groups it acts on beside its own."""

    group: str
    values: Mapping[str, Any]
    reaches: frozenset[str] = frozenset()


def chosen_apart(chosen: Iterable[str]) -> dict[str, Option]:
    """Options `GROUP=NAME` that act on their own group alone, and on which no other acts.

    Words other than an option's plain name, and a group's second, act on everything.
    """
    options = {text: read_option(*text.split("=", 1)) for text in chosen}
    groups = [option.group for option in options.values()]
    reached = frozenset().union(*(option.reaches for option in options.values()))
    return {
        text: option
        for text, option in options.items()
        if not option.reaches and option.group not in reached and groups.count(option.group) == 1
    }


def read_option(group: str, name: str) -> Option:
    if (group, name) == (STUDIES, STUDY_FILE):
        return Option(group, {}, frozenset((group,)))
    if name not in load_catalog().get(group, ()):
        return Option(group, {}, EVERYTHING)
    declared = declared_option(group, name)
    return _read(group, file_of(group, name)) if declared is None else Option(group, declared)


def declared_option(group: str, name: str) -> dict[str, str] | None:
    """Values of an option that code declares, an engine without a file in conf/; None of others."""
    declared = group == "engine" and name in EngineName.__members__ and not file_of(group, name).exists()
    return {"name": name} if declared else None


@functools.cache
def _read(group: str, path: Path) -> Option:
    file = read_file(path, group)
    reached = EVERYTHING if file.package not in (group, "_global_") else frozenset()
    if file.package == "_global_":
        reached |= frozenset(file.values)
    for line in file.lines:
        reached |= {line.group}
        if line.group != group:
            reached = reached.union(*(read_option(line.group, name).reaches for name in line.names))
    return Option(group, file.values, reached)
