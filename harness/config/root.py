"""The typed root as OmegaConf holds it, with fixed and open keys."""

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

SAID = ("model.family",)


def typed_root() -> DictConfig:
    root = OmegaConf.structured(Config)
    for path in OPEN_DICTS:
        OmegaConf.set_struct(OmegaConf.select(root, path), False)
    for path in SAID:
        OmegaConf.update(root, path, MISSING)
    return cast(DictConfig, root)
