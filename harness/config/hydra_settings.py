"""Hydra's own settings, typed or in option files: which are honoured, and what to type in place of the others.

Any sweeper and launcher of Hydra can carry out a set of cells (-m). Where runs lie and what is logged is Hydra's
to say only for these; a setting that would have no effect is refused wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.config.errors import Violation
from harness.config.option import OptionFile, files_of

SWEEPER, LAUNCHER = "harness", "basic"
"""The sweeper and launcher where none is named: one plan for all cells, carried out where `cluster` says."""
_RUNS = "launch.root=DIR, the folder of all runs; study.name=NAME makes the folder in it"
INSTEAD = {"run": _RUNS, "sweep": _RUNS, "output_subdir": _RUNS}
ALONE = "name it in words, or in an option that all cells have"
OF_JOBS = ("sweep", "job_logging", "hydra_logging")
"""Settings of jobs that Hydra starts: honoured beside a sweeper or launcher of Hydra's."""


@dataclass(frozen=True)
class HydraSetting:
    """subject: the word, or file and place. key: path under `hydra`, such as `launcher.n_jobs`; empty for all of it.
    swept: it stands in one of several options, which Hydra composes for each job after it chose the launcher."""

    subject: str
    key: str
    value: Any = None
    swept: bool = False

    @property
    def part(self) -> str:
        return self.key.partition(".")[0]


@dataclass(frozen=True)
class Asked:
    """Settings that a request has for Hydra. typed_multirun: -m was typed."""

    settings: tuple[HydraSetting, ...]
    typed_multirun: bool

    def _chosen(self, part: str, default: str) -> str:
        names = [str(each.value) for each in self.settings if each.key == part and isinstance(each.value, str)]
        return names[0] if names else default  # typed ones come first, as Hydra has it

    @cached_property
    def sweeper(self) -> str:
        return self._chosen("sweeper", SWEEPER)

    @cached_property
    def launcher(self) -> str:
        return self._chosen("launcher", LAUNCHER)

    @cached_property
    def multirun(self) -> bool:
        return self.typed_multirun or self._chosen("mode", "").upper() == "MULTIRUN"

    @property
    def by_hydra(self) -> bool:
        """True if Hydra's sweeper or launcher starts the jobs, each of which carries out one cell."""
        return self.sweeper != SWEEPER or self.launcher != LAUNCHER

    @property
    def draws(self) -> bool:
        """True if the sweeper chooses values by what earlier jobs returned."""
        return self.sweeper not in (SWEEPER, "basic")

    def violations(self) -> Iterator[Violation]:
        for each in self.settings:
            if each.subject.startswith(("+", "~")) and not each.key.startswith(("sweeper.", "launcher.")):
                yield refusal(each.subject, each.key)
            elif each.part in ("sweeper", "launcher"):
                if each.swept:
                    yield Violation(each.subject, "stands in one of several options, and a set has one", fix=ALONE)
                elif not self.multirun:
                    instead = "" if each.part == "sweeper" else "; cluster=slurm for one cell"
                    problem = "is for a set of cells, where its option is chosen beside -m"
                    yield Violation(each.subject, problem, fix=f"-m{instead}")
            elif each.key == "mode":
                if str(each.value).upper() != "MULTIRUN":
                    yield Violation(each.subject, "one cell is what is asked for without -m", "MULTIRUN")
            elif each.part not in OF_JOBS or not self.by_hydra:
                yield refusal(each.subject, each.key)


def is_hydra(key: str) -> bool:
    return re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"), maxsplit=1)[0] == "hydra"


def setting(subject: str, key: str, value: Any) -> HydraSetting:
    """Args: key: as written, such as `/hydra/launcher` or `hydra.launcher.n_jobs`."""
    parts = re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"))
    return HydraSetting(subject, ".".join(parts[1:]), value)


def refusal(subject: str, key: str) -> Violation:
    problem = "Hydra's own settings are fixed but for its sweepers and launchers: the harness decides where runs lie"
    return Violation(subject, problem, fix=INSTEAD.get(key.partition(".")[0], "leave it out"))


def in_option(group: str, name: str) -> Iterator[HydraSetting]:
    for file in files_of(group, name):
        yield from _in_file(file)


def _in_file(file: OptionFile) -> Iterator[HydraSetting]:
    if is_hydra(file.package):
        yield setting(f"{file.path}: @package {file.package}", file.package, file.values)
    for key in filter(is_hydra, map(str, file.values)):
        inside = file.values[key]
        pairs = [(f"{key}.{each}", inside[each]) for each in inside] if isinstance(inside, dict) else [(key, inside)]
        yield from (setting(f"{file.path}: {path}", path, value) for path, value in pairs)
    for line in file.lines:
        if is_hydra(line.path) or is_hydra(line.package):
            where = line.group if is_hydra(line.path) else line.package
            names = line.names or (line.path.rpartition("/")[2],)
            chosen = f": {', '.join(line.names)}" if line.names else ""
            value = names[0] if len(names) == 1 else [*names]
            yield setting(f"{file.path}: defaults: {line.words}{chosen}", where, value)
