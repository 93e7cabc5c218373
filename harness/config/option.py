"""Values of an option, and the groups it acts on, from its file or from code, without Hydra."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.config.catalog import STUDY_FILE, file_of, load_catalog
from harness.config.compose import declared_option
from harness.config.schema import Config

EVERYTHING = frozenset(Config.__dataclass_fields__)


@dataclass(frozen=True)
class Option:
    group: str
    values: Mapping[str, Any]
    reaches: frozenset[str]


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
    if (group, name) == ("study", STUDY_FILE):
        return Option(group, {}, frozenset((group,)))
    if name not in load_catalog().options.get(group, ()):
        return Option(group, {}, EVERYTHING)
    if group == "study":  # its file is written for people, and made whole when Hydra reads it
        return Option(group, {}, frozenset((group,)))
    declared = declared_option(group, name)
    return _read(group, file_of(group, name)) if declared is None else Option(group, declared, frozenset())


@functools.cache
def _read(group: str, file: Path) -> Option:
    text = file.read_text(encoding="utf-8")
    values = yaml.safe_load(text) or {}
    defaults = values.pop("defaults", [])
    return Option(group, values, _chosen_beside(group, defaults) | _set_beside(text, values))


def _chosen_beside(group: str, defaults: Iterable[object]) -> frozenset[str]:
    reached: set[str] = set()
    for each in defaults:
        words, name = next(iter(each.items())) if isinstance(each, dict) else (str(each), None)
        path = words.removeprefix("override ").partition("@")[0]
        other = path.removeprefix("/") if path.startswith("/") else group
        reached |= {other} | (read_option(other, str(name)).reaches if other != group else frozenset())
    return frozenset(reached)


def _set_beside(text: str, values: Mapping[str, Any]) -> frozenset[str]:
    packages = [line.split()[-1] for line in text.splitlines() if line.startswith("# @package")]
    if not packages:
        return frozenset()
    return frozenset(values) if packages == ["_global_"] else EVERYTHING
