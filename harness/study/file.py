"""A study file as written -> the values the typed root holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from harness.config.catalog import STUDY_FILE, study_path
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, Violation, refuse
from harness.store.reading import read_text
from harness.store.reading_yaml import Loader, read_yaml
from harness.store.shapes import Shape

CONTENT: Shape = {}
"""A mapping, whose content is checked in the typed root."""

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
    """Register the study that a request names by its path (`study=./mine.yaml`), if it does.

    Raises `StoreError`: no YAML mapping, or unreadable. `BadRequest`: an empty file, a duplicate key, or a date as
    value.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        path = study_path(value) if key == "study" else None
        if path is not None and path.is_file():
            raw = read_yaml(path, CONTENT)
            if not raw:
                raise refuse(text, "the file says nothing", fix="sweeps/parity_pair.yaml shows a whole one")
            if found := [*_said_twice(path), *_dates(raw, str(path))]:
                raise BadRequest(found)
            node = normalise(raw, path.stem)
            _typed[f"study={STUDY_FILE}"] = text
            ConfigStore.instance().store(group="study", name=STUDY_FILE, node=node, provider="harness")


def _said_twice(path: Path) -> Iterator[Violation]:
    nodes = [yaml.compose(read_text(path) or "", Loader)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
            keys = [str(key.value) for key, _ in node.value]
            for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
                lines = [str(each.start_mark.line + 1) for each, _ in node.value if each.value == key]
                where = f"stands in one table {len(lines)} times: lines {', '.join(lines)}"
                yield Violation(f"{path}: {key}", where, fix="keep one; an axis of several values is a list")


def _dates(value: Any, where: str) -> Iterator[Violation]:
    if isinstance(value, date):
        yield Violation(f"{where}: {value}", "YAML reads this as a date", fix=f'"{value}"')
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _dates(each, where)
            yield from _dates(key, where)
    elif isinstance(value, list):
        for each in value:
            yield from _dates(each, where)


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
