"""A study file as written -> the values the typed root holds; with a command line -> points to run, each with its
control."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from yaml import YAMLError

from harness.config.catalog import STUDY_FILE, study_path
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.overrides import MAX_SWEEP, Word, check_overrides
from harness.config.schema import StudyConfig
from harness.store.reading import read_text

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
    axes = [*_file_axes(study, typed), *([{word.key: value} for value in word.values] for word in words)]
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


def _file_axes(study: StudyConfig, typed: set[str]) -> Iterator[list[Assignment]]:
    for key, values in study.grid.items():
        if key not in typed:
            yield [{key: value} for value in values]
    zipped = {key: values for key, values in study.zip.items() if key not in typed}
    if zipped:
        yield [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]


def _check_file(study: StudyConfig) -> None:
    violations = []
    lengths = {key: len(values) for key, values in study.zip.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        violations.append(Violation(f"study={study.name} zip", f"axes advance together and differ in length: {shown}"))
    for text in sorted(_file_texts(study)):
        try:
            check_overrides([text])
        except BadRequest as error:
            violations += [replace(v, subject=f"study={study.name}: {v.subject}") for v in error.violations]
    if violations:
        raise BadRequest(list(dict.fromkeys(violations)))  # a wrong key is wrong with each of its values


def _file_texts(study: StudyConfig) -> set[str]:
    texts = {*_texts(study.base), *_texts(study.control)}
    for axes in (study.grid, study.zip):
        texts |= {f"{key}={value}" for key, values in axes.items() for value in values}
    return texts | {text for line in study.skip_if for text in line.split()}


PAIRS = ("control", "base")
AXES = ("grid", "zip")


def normalise(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Normalise short YAML: bare null, numbers and lists as values, one value for an axis of one.

    Args: name: the file's stem, default of the study's name.
    """
    study: dict[str, Any] = {"name": name, **raw}
    for key in PAIRS:
        if isinstance(study.get(key), Mapping):
            study[key] = {str(k): as_typed(v) for k, v in study[key].items()}
    if isinstance(study.get("margins"), Mapping):
        study["margins"] = {str(k): v for k, v in study["margins"].items()}
    for key in AXES:
        if isinstance(study.get(key), Mapping):
            study[key] = {str(k): [as_typed(v) for v in _listed(values)] for k, values in study[key].items()}
    return study


_typed: dict[str, str] = {}


def as_asked(words: Sequence[str]) -> list[str]:
    return [_typed.get(word, word) for word in words]


def register(overrides: Sequence[str]) -> None:
    """Register the study that a request names (`study=parity_pair`, `study=./mine.yaml`), if it does.

    Raises `StoreError`: unreadable. `BadRequest`: no YAML mapping, an empty file, or a duplicate key.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        path = study_path(value) if key == "study" else None
        if path is not None and path.is_file():
            node = normalise(_read(path), path.stem)
            _typed[f"study={STUDY_FILE}"] = text
            ConfigStore.instance().store(group="study", name=STUDY_FILE, node=node, provider="harness")


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


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
