"""A study file as written -> the values the typed root holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore

from harness.config.catalog import STUDY_FILE, study_path
from harness.config.doc import as_typed
from harness.config.errors import refuse
from harness.store.reading import read_yaml
from harness.store.shapes import Shape

CONTENT: Shape = {}
"""A study file is a mapping; what is in it is checked when it is put into the typed root."""

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


_typed: dict[str, str] = {}
"""What Hydra was told of a study file -> how it was typed."""


def as_asked(words: Sequence[str]) -> list[str]:
    """Words that come back from Hydra, with a study file under the path it was typed by."""
    return [_typed.get(word, word) for word in words]


def register(overrides: Sequence[str]) -> None:
    """Give Hydra the study that a request names by its path (`study=./mine.yaml`), if it does.

    Raises:
        StoreError: the file is no YAML mapping, or cannot be read.
        BadRequest: it is empty.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        path = study_path(value) if key == "study" else None
        if path is not None and path.is_file():
            raw = read_yaml(path, CONTENT)
            if not raw:
                raise refuse(text, "the file says nothing", fix="sweeps/parity_pair.yaml shows a whole one")
            node = normalise(raw, path.stem)
            _typed[f"study={STUDY_FILE}"] = text
            ConfigStore.instance().store(group="study", name=STUDY_FILE, node=node, provider="harness")


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
