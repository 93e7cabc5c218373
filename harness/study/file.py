"""A study file as written -> the values the typed root holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.doc import as_typed

PAIRS = ("control", "base")
AXES = ("grid", "zip")


def normalise(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Let a study be written as YAML reads best: bare null, numbers and lists as values, one value for an axis of one.

    Args:
        raw: the file's content.
        name: the file's stem; the study's name unless the file gives one.
    """
    study: dict[str, Any] = {"name": name, **raw}
    for key in PAIRS:
        if isinstance(study.get(key), Mapping):
            study[key] = {str(k): as_typed(v) for k, v in study[key].items()}
    for key in AXES:
        if isinstance(study.get(key), Mapping):
            study[key] = {str(k): [as_typed(v) for v in _listed(values)] for k, values in study[key].items()}
    return study


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
