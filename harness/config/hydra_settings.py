"""Refusal of Hydra's own settings, typed or in option files, with the alternative to type.

Hydra would compose them, and launchers and sweepers named there would be silently ignored or fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config import catalog
from harness.config.errors import Violation
from harness.store.errors import StoreError
from harness.store.reading import read_text, read_yaml
from harness.store.shapes import Maybe

_RUNS = "launch.root=DIR, the folder of all runs; study.name=NAME makes the folder in it"
INSTEAD = {
    "launcher": "cluster=slurm submits jobs, cluster=local runs here",
    "sweeper": "-m a=1,2 for a set of cells, or a study file: -m study=FILE.yaml",
    "mode": "-m for a set of cells",
    "run": _RUNS,
    "sweep": _RUNS,
}

_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


def is_hydra(key: str) -> bool:
    return re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"), maxsplit=1)[0] == "hydra"


def refusal(subject: str, key: str) -> Violation:
    part = re.split(r"[./]", key.lstrip("/"))[1:2]
    problem = "Hydra's own settings are fixed: the harness decides where and how cells run"
    return Violation(subject, problem, fix=INSTEAD.get(part[0] if part else "", "leave it out"))


def in_option(group: str, name: str) -> Iterator[Violation]:
    yield from _in_file(_file(f"{group}/{name}"), group, set())


def in_study_file(file: Path) -> Iterator[Violation]:
    yield from _in_file(file, catalog.STUDIES, set())


def _file(path: str) -> Path | None:
    group, _, name = path.rpartition("/")
    if group == catalog.STUDIES:
        return catalog.study_path(name) or catalog.ROOT / "sweeps" / f"{name}.yaml"
    file = catalog.file_of(group, name)
    return file if file.is_file() else None


def _in_file(file: Path | None, group: str, seen: set[Path]) -> Iterator[Violation]:
    if file is None or file in seen:
        return
    seen.add(file)
    try:
        values: Mapping[str, Any] = read_yaml(file, Maybe(dict)) or {}
        package = _PACKAGE.search(read_text(file) or "")
    except StoreError:  # Hydra, or the reader of one's own files, says what is wrong with it
        return
    if package and is_hydra(package[1]):
        yield refusal(f"{file}: @package {package[1]}", package[1].removeprefix("_global_."))
    for key in filter(is_hydra, map(str, values)):
        inside = values[key]
        paths = [f"{key}.{each}" for each in inside] if key == "hydra" and isinstance(inside, dict) else [key]
        yield from (refusal(f"{file}: {path}", path) for path in paths)
    defaults = values.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        yield from _in_default(entry, file, group, seen)


def _in_default(entry: object, file: Path, group: str, seen: set[Path]) -> Iterator[Violation]:
    """Check a line of a defaults list: `- name`, `- override /group@package: name`, `- optional group: [name,
    name]`."""
    words, names = next(iter(entry.items())) if isinstance(entry, dict) and entry else (str(entry), None)
    path, _, package = str(words).rpartition(" ")[2].partition("@")
    if is_hydra(path) or is_hydra(package):
        chosen = "" if names is None else f": {names}"
        yield refusal(f"{file}: defaults: {words}{chosen}", path if is_hydra(path) else package)
        return
    whole = path.lstrip("/") if path.startswith("/") else f"{group}/{path}"
    for name in names if isinstance(names, list) else [names]:
        below = whole if names is None else f"{whole}/{name}"
        yield from _in_file(_file(below.removesuffix(".yaml")), below.rpartition("/")[0], seen)
