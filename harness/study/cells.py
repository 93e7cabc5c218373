"""Points -> cells: composed once for each distinct choice of groups, then only values change."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from harness.config.catalog import load_catalog
from harness.config.compose import Cell, defaults, freeze, unresolved
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.option import chosen_apart
from harness.config.overrides import hydra_words
from harness.config.typed import put
from harness.launch.plan import in_blocks
from harness.store.reading_yaml import copied
from harness.store.rundir import flatten
from harness.study.expand import Point


@dataclass(frozen=True)
class Desired:
    cells: tuple[Cell, ...]
    """Distinct cells in order of their start: controls before their arms, timed cells last, in blocks (`order`)."""
    controls: dict[str, str]


class Composer:
    """Composes cells with Hydra's loader, which takes a quarter of a second for a choice of groups.

    Hydra runs once for each choice among options that reach beyond their group (`Option`); values of other options are
    put in place. `tests/study/test_cells.py` holds that Hydra gives the same.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        self._composed: dict[tuple[str, ...], dict[str, Any]] = {}
        self._groups = set(load_catalog())
        self._parse = functools.cache(OverridesParser.create().parse_override)

    def cell(self, overrides: Sequence[str]) -> Cell:
        """Compose, check and freeze one cell. Raises `BadRequest`, as `compose_cell`."""
        chosen = tuple(hydra_words([text for text in overrides if text.partition("=")[0] in self._groups]))
        values = self._with_options(chosen)
        for text in overrides:
            if text.partition("=")[0] not in self._groups:
                override = self._parse(text)
                put(values, override.key_or_group, override.value())
        return freeze(values, overrides)

    def _with_options(self, chosen: tuple[str, ...]) -> dict[str, Any]:
        apart = chosen_apart(chosen)
        asked = tuple(text for text in chosen if text not in apart)
        if asked not in self._composed:
            self._composed[asked] = unresolved(self._loader.load_sweep_config(self._master, list(asked)))
        values: dict[str, Any] = copied(self._composed[asked])
        for option in apart.values():
            values[option.group] = copied({**defaults()[option.group], **option.values})
        return values


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
        _same_or_refuse(distinct.setdefault(cell.signature, cell), cell)
    pairs = ((cells[p.overrides].signature, cells[p.control].signature) for p in points if p.control is not None)
    controls = {arm: control for arm, control in pairs if arm != control}
    return Desired(in_blocks(list(distinct.values())), controls)


def _same_or_refuse(first: Cell, second: Cell) -> None:
    one, other = flatten(first.config), flatten(second.config)
    differing = [key for key in one if one[key] != other.get(key)]
    if differing:
        key = differing[0]
        raise refuse(
            f"{key}={as_typed(one[key])},{as_typed(other.get(key))}",
            "asks for one run in two ways: this setting is no part of what a run is",
            fix="one value, or two requests with two launch.root",
        )
