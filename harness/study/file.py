"""A study file as written -> the values the typed root holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from yaml import YAMLError

from harness.config.catalog import STUDY_FILE, study_path
from harness.config.doc import as_typed
from harness.config.errors import refuse
from harness.store.reading import read_text

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
