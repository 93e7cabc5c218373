"""A study file as written -> the values the typed root holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
            study[key] = {str(k): as_override(v) for k, v in study[key].items()}
    for key in AXES:
        if isinstance(study.get(key), Mapping):
            study[key] = {str(k): [as_override(v) for v in _listed(values)] for k, values in study[key].items()}
    return study


def as_override(value: Any) -> str:
    """A YAML value as the right side of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_override(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{as_override(v)}" for k, v in value.items()) + "}"
    return str(value)


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
