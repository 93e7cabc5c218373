"""The typed root as OmegaConf holds it: which keys are fixed, and which the user names."""

from __future__ import annotations

from typing import cast

from omegaconf import MISSING, DictConfig, OmegaConf

from harness.config.schema import Config

OPEN_DICTS = (
    "cluster.additional",
    "optimizer.options",
    "study.control",
    "study.base",
    "study.grid",
    "study.zip",
    "study.margins",
)
"""Settings whose keys the user names; every other key is fixed by the schema."""

SAID = ("model.family",)
"""Settings every option of their group must say: a model file that leaves its family out would train another module."""


def typed_root() -> DictConfig:
    """Make the empty typed root; its user-named dictionaries accept new keys, nothing else does; `SAID` is missing."""
    root = OmegaConf.structured(Config)
    for path in OPEN_DICTS:
        OmegaConf.set_struct(OmegaConf.select(root, path), False)
    for path in SAID:
        OmegaConf.update(root, path, MISSING)
    return cast(DictConfig, root)
