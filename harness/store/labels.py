"""Short names of runs: by their settings, for axes, legends and reports; by their folders' names, for terminals.

[Note: Labels] A study's cells differ in a few settings, each of which may imply others: a dtype policy sets six dtypes.
A group with a leading setting (`dtype.name`) shows the others only where the leading one does not determine them. How a
run is started, watched and synced is shown only where nothing else differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from harness.fsdp.options import OuterStrategy
from harness.store.identity import EXCLUDED
from harness.store.rundir import flatten

Key = TypeVar("Key", bound=Hashable)
Flat = Mapping[str, Any]
LEADING = (
    *("model.name", "data.kind", "optimizer.name", "engine.name", "sharding.strategy", "dtype.name"),
    *("numerics.mode", "nccl_ub.mode", "sharp.group", "fault.name"),
)
HOW = ("measure", "ckpt")
SAID: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(LEADING, str),
    "model.name": lambda value: f"model {value}",
    "data.kind": lambda value: f"{value} data",
    "fault.name": lambda value: "no fault" if value == "none" else str(value).rpartition(":")[2],
    "nccl_ub.mode": lambda value: f"ub {value}",
    "sharp.group": lambda value: f"sharp {value}",
    "mesh.world_size": lambda value: f"{value} rank{'s' * (value != 1)}",
    "mesh.tp": lambda value: f"tp {value}",
    "train.seed": lambda value: f"seed {value}",
    "train.replicate": lambda value: f"repetition {value}",
}


def strategy_of(config: Mapping[str, Any]) -> str:
    """Sharding of a frozen configuration, nested or dotted: `optim`, `hsdp`, `hfsdp`, or `optim inside, no_shard
    outside`."""
    flat = flatten(dict(config))
    inner, outer = str(flat.get("sharding.strategy")), str(flat.get("sharding.outer", "no_shard"))
    if flat.get("mesh.dp_outer", 1) == 1:
        return inner
    return OuterStrategy[outer].hybrid if inner == "optim_grads_params" else f"{inner} inside, {outer} outside"


def labels(configs: Mapping[Key, Mapping[str, Any]]) -> dict[Key, str]:
    """A label a run, such as `native, optim_grads, bf16`: its values of the settings that differ between runs.

    What all arms share is said where their control differs in it. configs: frozen, nested or dotted.

    Returns labels that differ wherever the defining configurations differ; `the only run` for a single one.
    """
    flat = {key: _settings(config) for key, config in configs.items()}
    keys = _keys(flat)
    return _distinct({key: _label(own, keys) for key, own in flat.items()}, flat)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    flat = flatten(dict(config))
    flat["sharding.strategy"] = strategy_of(flat)
    return {key: value for key, value in flat.items() if key.split(".")[0] not in EXCLUDED}


def _keys(configs: Mapping[Any, Flat]) -> list[str]:
    every = list(configs.values())
    names = list(dict.fromkeys(key for own in every for key in own))
    found = [key for key in names if any(own.get(key) != every[0].get(key) for own in every)]
    found = [key for key in found if key.split(".")[0] not in HOW] or found
    found = [key for key in found if not _implied(key, found, every)]
    return sorted(found, key=lambda key: (key not in LEADING, [*LEADING, *names].index(key)))


def _implied(key: str, found: Sequence[str], every: Sequence[Flat]) -> bool:
    group = key.split(".")[0]
    leader = next((each for each in LEADING if each in found and each.split(".")[0] == group), None)
    values: dict[str, str] = {}
    said = ((str(own.get(str(leader))), str(own.get(key))) for own in every)
    return leader not in (None, key) and all(values.setdefault(lead, value) == value for lead, value in said)


def _label(own: Flat, keys: Sequence[str]) -> str:
    said = [say(key, own.get(key)) for key in keys if key != "train.replicate" or own.get(key) or len(keys) == 1]
    return ", ".join(said) or "the only run"


def say(key: str, value: Any) -> str:
    return SAID[key](value) if key in SAID else f"{key.rpartition('.')[2]}={value}"


def _distinct(found: dict[Key, str], flat: Mapping[Key, Flat]) -> dict[Key, str]:
    for text in [text for text, count in Counter(found.values()).items() if count > 1]:
        alike = {key: flat[key] for key, own in found.items() if own == text}
        keys = _keys(alike)
        for key, own in alike.items():
            more = _label(own, keys)
            found[key] = text if more == "the only run" else more
    return found


def named(names: Collection[str]) -> dict[str, str]:
    """Names of folders without parts that all have. A name that would be empty stays."""
    parts = {name: name.split("-") for name in names}
    common = set.intersection(*(set(each) for each in parts.values())) if len(parts) > 1 else set()
    return {name: "-".join(part for part in each if part not in common) or name for name, each in parts.items()}
