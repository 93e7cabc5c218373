"""A study file as written -> the values the typed root holds; with a command line -> points, each with its control.

Points -> cells, composed once for each distinct choice of groups; then only values change.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from harness.config.catalog import STUDIES, STUDY_FILE, chosen_apart, file_of, load_catalog, study_of
from harness.config.compose import Cell, defaults, freeze, plain
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.hydra_settings import same_jobs
from harness.config.overrides import MAX_SWEEP, Word, check_overrides, hydra_words
from harness.config.schema import StudyConfig
from harness.config.typed import put
from harness.launch.opening import in_blocks
from harness.store.reading import read_text
from harness.store.reading_yaml import copied
from harness.store.rundir import flatten

Assignment = dict[str, str]


@dataclass(frozen=True)
class Point:
    overrides: tuple[str, ...]
    control: tuple[str, ...] | None
    """None where the study names no control."""


def expand(study: StudyConfig, words: Sequence[Word]) -> list[Point]:
    """Points of a study: base, grid x zip x command-line axes x replicates, less those of `skip_if`.

    A typed key replaces that key in `base`, `grid` and `zip`. An arm's control is the arm itself with the overrides of
    `study.control`, so an axis the control does not name (a seed, a replicate) pairs each arm with its own control.

    Raises `BadRequest`: an override of the file is wrong, zipped axes differ in length, or nothing is left.
    """
    _check_file(study)
    typed = {word.key for word in words}
    base = {key: value for key, value in study.base.items() if key not in typed}
    axes = [[{key: value} for value in values] for key, values in study.grid.items() if key not in typed]
    if zipped := {key: values for key, values in study.zip.items() if key not in typed}:
        axes.append([dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)])
    axes += [[{word.key: value} for value in word.values] for word in words]
    if study.replicates > 1 and "train.replicate" not in typed:
        axes.append([{"train.replicate": str(number)} for number in range(study.replicates)])
    if (count := math.prod(map(len, axes))) > MAX_SWEEP:
        choices, fix = f"1 to {MAX_SWEEP:,}", "fewer values, or parts of it"
        raise refuse(f"study={study.name}", f"makes {count:,} cells", choices=choices, fix=fix)
    skipped = [set(line.split()) for line in study.skip_if]
    points = []
    for combination in itertools.product(*axes):
        arm = dict(base)
        for assignment in combination:
            arm |= assignment
        overrides = _texts(arm)
        if not any(line <= set(overrides) for line in skipped):
            points.append(Point(overrides, _texts(arm | study.control) if study.control else None))
    if not points:
        raise BadRequest([Violation(f"study={study.name}", "has no cells: an axis is empty or skip_if leaves out all")])
    return points


def _texts(assignment: Assignment) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in assignment.items())


def _check_file(study: StudyConfig) -> None:
    violations = []
    if len({*map(len, study.zip.values())}) > 1:
        shown = ", ".join(f"{key} has {len(values)}" for key, values in study.zip.items())
        violations.append(Violation(f"study={study.name} zip", f"axes advance together and differ in length: {shown}"))
    texts = {*_texts(study.base), *_texts(study.control), *(text for line in study.skip_if for text in line.split())}
    for axes in (study.grid, study.zip):
        texts |= {f"{key}={value}" for key, values in axes.items() for value in values}
    for text in sorted(texts):
        try:
            check_overrides([text])
        except BadRequest as error:
            violations += [replace(v, subject=f"study={study.name}: {v.subject}") for v in error.violations]
    if violations:
        raise BadRequest(list(dict.fromkeys(violations)))  # a wrong key is wrong with each of its values


def _listed(values: Any) -> list[str]:
    return [as_typed(each) for each in (values if isinstance(values, list) else [values])]


TABLES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("control", "base"), as_typed),
    **dict.fromkeys(("grid", "zip"), _listed),
    "margins": lambda value: value,
}
"""Settings of a study that are tables, and what becomes of their values."""


def normalise(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Normalise short YAML: bare null, numbers and lists as values, one value for an axis of one.

    Args: name: the file's stem, default of the study's name.
    """
    study = {"name": name, **raw}
    tables = {key: study[key] for key in TABLES.keys() & study.keys() if isinstance(study[key], Mapping)}
    return study | {key: {str(k): TABLES[key](v) for k, v in table.items()} for key, table in tables.items()}


_typed: dict[str, str] = {}


def as_asked(words: Sequence[str]) -> list[str]:
    return [_typed.get(word, word) for word in words]


def register(overrides: Sequence[str]) -> None:
    """Register the study that a request names (`study=parity_pair`), if it does.

    Raises `StoreError`: unreadable. `BadRequest`: no YAML mapping, an empty file, or a duplicate key.
    """
    for text in overrides:
        if name := study_of(text):
            node = normalise(_read(file_of(STUDIES, name)), name)
            _typed[f"{STUDIES}={STUDY_FILE}"] = text
            ConfigStore.instance().store(group=STUDIES, name=STUDY_FILE, node=node, provider="harness")


def _read(path: Path) -> dict[str, Any]:
    """A study as Hydra would read it."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(read_text(path) or ""), resolve=False)
    except YAMLError as error:
        raise refuse(str(path), f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise refuse(str(path), "is a list, not a table of settings")
    if not found:
        raise refuse(str(path), "the file says nothing", fix="sweeps/parity_pair.yaml shows a whole one")
    return {str(key): value for key, value in found.items()}


@dataclass(frozen=True)
class Desired:
    cells: tuple[Cell, ...]
    """Distinct cells in order of their start: controls before their arms, timed cells last, in blocks (`order`)."""
    controls: dict[str, str]


class Composer:
    """Composes cells with Hydra's loader, which takes a quarter of a second for a choice of groups.

    Hydra runs once for each choice among options that reach beyond their group (`read_option`); values of other options
    are put in place. `tests/study/test_cells.py` holds that Hydra gives the same.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        self._composed: dict[tuple[str, ...], dict[str, Any]] = {}
        self._groups = set(load_catalog())
        self._parse = functools.cache(OverridesParser.create().parse_override)

    def cell(self, overrides: Sequence[str]) -> Cell:
        """Compose, check and freeze one cell. Raises `BadRequest`, as `compose_cell`."""
        chosen = tuple(hydra_words([text for text in overrides if text.partition("=")[0] in self._groups]))
        apart = chosen_apart(chosen)
        asked = tuple(text for text in chosen if text not in apart)
        if asked not in self._composed:
            composed = self._loader.load_sweep_config(self._master, list(asked))
            same_jobs(self._master, composed)
            self._composed[asked] = plain(composed, resolve=False)
        values: dict[str, Any] = copied(self._composed[asked])
        for group, own in apart.values():
            values[group] = copied({**defaults()[group], **own})
        for text in overrides:
            if text.partition("=")[0] not in self._groups:
                override = self._parse(text)
                put(values, override.key_or_group, override.value())
        return freeze(values, overrides)


def desired(points: Sequence[Point], composer: Composer) -> Desired:
    """Compose every point and its control, without duplicates. Raises `BadRequest` with the distinct violations of all
    cells."""
    cells: dict[tuple[str, ...], Cell] = {}
    problems: Counter[Violation] = Counter()
    wanted = list(dict.fromkeys(o for point in points for o in (point.control, point.overrides) if o is not None))
    for overrides in wanted:
        try:
            cells[overrides] = composer.cell(overrides)
        except BadRequest as error:
            problems.update(error.violations)
    if problems:
        parts = {v: f" (in {count} of {len(wanted)} cells)" * (count < len(wanted)) for v, count in problems.items()}
        raise BadRequest(replace(v, problem=v.problem + part) for v, part in parts.items())
    distinct: dict[str, Cell] = {}
    for cell in cells.values():
        one, other = flatten(distinct.setdefault(cell.signature, cell).config), flatten(cell.config)
        if key := next((key for key in one if one[key] != other.get(key)), ""):
            problem = "asks for one run in two ways: this setting is no part of what a run is"
            fix = "one value, or two requests with two launch.root"
            raise refuse(f"{key}={as_typed(one[key])},{as_typed(other.get(key))}", problem, fix=fix)
    pairs = ((cells[p.overrides].signature, cells[p.control].signature) for p in points if p.control is not None)
    controls = {arm: control for arm, control in pairs if arm != control}
    return Desired(in_blocks(list(distinct.values())), controls)
