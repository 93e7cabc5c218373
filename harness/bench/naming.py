"""Names of rows and groups of rows: their strategy, and the settings that distinguish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.labels import strategy_of as strategy_of
from harness.store.rundir import flatten

Config = Mapping[str, Any]
Flat = Mapping[str, Any]

VARIED = ("engine", "sharding", "dtype", "numerics", "mesh", "nccl_ub", "sharp")


def details(arms: Mapping[str, Config]) -> dict[str, str]:
    flat = {arm: flatten({group: config[group] for group in VARIED}) for arm, config in arms.items()}
    kinds = {arm: (config["engine"]["name"], strategy_of(config)) for arm, config in arms.items()}
    found = {}
    for arm, own in flat.items():
        keys = differing([other for name, other in flat.items() if kinds[name] == kinds[arm]])
        if "dtype.name" in keys:
            keys = [key for key in keys if not key.startswith("dtype.") or key == "dtype.name"]
        found[arm] = " ".join(f"{key.removesuffix('.name')}={own[key]}" for key in keys)
    return found


def differing(settings: Sequence[Flat]) -> list[str]:
    first = settings[0]
    return [key for key in first if any(other.get(key) != first[key] for other in settings[1:])]


def title(settings: Flat, keys: Sequence[str]) -> str:
    named = [key for key in keys if key.endswith(".name")]
    named += [key for key in keys if key == "mesh.world_size"]
    return ", ".join(f"{key}={settings[key]}" for key in named or keys) or str(settings["model.name"])
