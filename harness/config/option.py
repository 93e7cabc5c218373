"""Files of options, as written: values, package, and the lines of their defaults lists; read without Hydra."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.capabilities import EngineName
from harness.config.catalog import STUDIES, STUDY_FILE, file_of, load_catalog, study_path
from harness.config.schema import Config
from harness.store.errors import StoreError
from harness.store.reading import read_text
from harness.store.reading_yaml import read_yaml
from harness.store.shapes import Maybe

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
