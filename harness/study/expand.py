"""A study and a command line -> points to run, each with its control. Pure: words in, words out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.config.errors import BadRequest, Violation, refuse
from harness.config.overrides import MAX_SWEEP, Word, check_overrides
from harness.config.schema import StudyConfig

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
    axes = [*_file_axes(study, typed), *_typed_axes(words)]
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


def _typed_axes(words: Sequence[Word]) -> Iterator[list[Assignment]]:
    for word in words:
        yield [{word.key: value} for value in word.values]


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
            violations += [_located(study, v) for v in error.violations]
    if violations:
        raise BadRequest(list(dict.fromkeys(violations)))  # a wrong key is wrong with each of its values


def _located(study: StudyConfig, v: Violation) -> Violation:
    return Violation(f"study={study.name}: {v.subject}", v.problem, v.choices, v.fix, v.about)


def _file_texts(study: StudyConfig) -> set[str]:
    texts = {*_texts(study.base), *_texts(study.control)}
    for axes in (study.grid, study.zip):
        texts |= {f"{key}={value}" for key, values in axes.items() for value in values}
    return texts | {text for line in study.skip_if for text in line.split()}
