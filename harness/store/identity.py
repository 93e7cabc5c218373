"""Identity of a run: canonical form, signature, and readable name of a configuration.

Pure functions of the plain, resolved configuration (nested dicts with enums as their names), equal on every machine and
in every process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from harness.fsdp.options import OuterStrategy

EXCLUDED = ("cluster", "launch", "wandb", "notes", "study", "run")
AXES = ("engine", "sharding", "dtype", "numerics", "mesh", "nccl_ub", "sharp", "fault", "ckpt", "measure", *EXCLUDED)
"""Groups that may differ in a comparison: axes of a study, and groups without numeric effect.

Settings of other groups must agree, so that a new one is refused until somebody decides about it.
"""
FREE = (
    "train.microbatch_size",  # the global batch is the same; its digest says so
    "train.replicate",
    "train.param_norm_every",
    "model.name",
    "model.activation_checkpointing",
)
HELD = ("cluster.device", "cluster.threads_per_rank")
"""Settings of a free group that must agree: sums depend on both."""
ADDED: Mapping[str, Mapping[str, Any]] = {
    "model": {"target": None, "parameters": None},
    "data": {"target": None},
    "optimizer": {"target": None, "options": {}},
    "dtype": {"fp8": None, "fp8_history": 1024},
    "ckpt": {"minutes": 10.0, "keep_best": 0},
    "fault": {"begins_at": 1},
    "measure": {
        "rounding_fp8": False,
        "callbacks": [],
        "validate_every": 0,
        "validation_batches": 1,
        "validation_path": None,
        "trace_steps": [],
        "trace_ranks": [0],
        "memory_snapshot": False,
        "step_checks": True,
        "step_checks_limit_mib": 256,
        "step_checks_share": 0.02,
    },
}
"""Later settings, each with the value of runs before it existed, or with one that trains alike."""
RENAMED: Mapping[str, Mapping[str, str]] = {
    "measure": {"step_checks": "vouch", "step_checks_limit_mib": "vouch_limit_mib"}
}
"""Former names of settings by those of today, which stored runs and all signatures have."""
REMOVED: Mapping[str, Mapping[str, Any]] = {
    "launch": {"fail_fast": False, "fork": None},
    "cluster": {"bind_to_device": True, "container_image": None, "container_mounts": [], "gres": None, "slots": 2},
    "dtype": {"fp8_history": 1024},
    "engine": {"accumulate_unsharded": False, "unit_min_elements": 0, "prefetch_limit_bytes": None},
    "ckpt": {"background": False},
    "measure": {"rounding_fp8": False},
    "nccl_ub": {"cta_policy": "default", "fallback": "error", "min_ctas": None, "max_ctas": None},
    "sharp": {"algo": None, "nvls_ctas": None, "overlap_gather": False},
}
"""Settings of stored runs that are none today, each with its default, which signatures still have, but for those of
`ADDED`."""
SHORT = 8
MAX_NAME = 100
UNUSUAL: Sequence[tuple[str, tuple[Any, ...], str]] = (
    ("data.kind", ("stdlib",), "{}"),
    ("optimizer.name", ("adamw",), "{}"),
    ("optimizer.lr", (0.001,), "lr{}"),
    ("train.steps", (20,), "steps{}"),
    ("measure.callbacks", ([],), "{}"),
    ("fault.name", ("none",), "{}"),
    ("fault.begins_at", (1,), "from{}"),
    ("numerics.mode", ("fast",), "{}"),
    ("nccl_ub.mode", ("none", "default"), "ub_{}"),
    ("sharp.group", ("none", "default"), "sharp_{}"),
    ("train.seed", (0,), "s{}"),
    ("train.replicate", (0,), "r{}"),
)
"""Settings, values that names leave out, and what names say of others."""


@cache
def must_agree(key: str) -> bool:
    """True for a dotted setting that must be the same in two runs that are compared."""
    if key in HELD:
        return True
    return key.split(".")[0] not in AXES and key not in FREE


def canonical(config: dict[str, Any]) -> str:
    """Defining text of a run: sorted, compact JSON without the excluded keys; floats round-trip.

    On CPU sharp=default is sharp=none, the former default, so that older runs are still found. Raises `ValueError`: a
    non-finite float. `TypeError`: a value is not plain (an enum, a tensor).
    """
    kept = {key: value for key, value in config.items() if key not in EXCLUDED}
    for group in kept.keys() & {*ADDED, *REMOVED, *RENAMED}:
        later, former = ADDED.get(group, {}), RENAMED.get(group, {})
        own = (REMOVED.get(group, {}) | kept[group]).items()
        kept[group] = {former.get(key, key): value for key, value in own if key not in later or value != later[key]}
    if kept.get("sharp", {}).get("group") == "default" and config.get("cluster", {}).get("device", "cpu") == "cpu":
        kept["sharp"] = kept["sharp"] | {"group": "none"}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)


def current(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration under today's names of settings, without those that are gone."""
    for group in config.keys() & {*REMOVED, *RENAMED}:
        if isinstance(held := config[group], dict):
            gone, names = REMOVED.get(group, {}), {former: name for name, former in RENAMED.get(group, {}).items()}
            dropped = {key for key in gone.keys() & held.keys() if group in EXCLUDED or held[key] == gone[key]}
            kept = {names.get(key, key): value for key, value in held.items() if key not in dropped}
            config = config | {group: kept}
    return config


def repeated(config: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """Defining text of a configuration and all its repetitions. Args: without: groups that may differ, too."""
    kept = {key: value for key, value in config.items() if key not in without}
    return canonical(kept | {"train": {**config.get("train", {}), "replicate": 0}})


def signature(config: dict[str, Any]) -> str:
    """SHA-256 of the canonical form, 64 hex digits."""
    return hashlib.sha256(canonical(config).encode()).hexdigest()


def slug(text: str) -> str:
    """Text as part of a file name: lower-case letters, digits, `_`, `.`, `-`; no dot or dash at either end."""
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.")


def run_name(config: dict[str, Any]) -> str:
    """Name from the cell alone, such as `tiny-native-optim_grads-bf16-dp2-k2-lr0.01-r1`; the signature makes it unique.

    `run.name` replaces it.
    """
    if own := config.get("run", {}).get("name"):
        return str(own)
    train, mesh, fault = config["train"], config["mesh"], config["fault"]
    world_size = mesh["world_size"] // mesh.get("tp", 1)
    microbatches = train["global_batch_size"] // max(1, train["microbatch_size"] * world_size)
    names = (config["engine"]["name"], config["sharding"]["strategy"], config["dtype"]["name"])
    parts = [_of_ones_own(config["model"], "name"), *names, _mesh(config), f"k{microbatches}"]
    said = {
        "data.kind": _of_ones_own(config["data"], "kind"),
        "optimizer.name": _of_ones_own(config["optimizer"], "name"),
        "optimizer.lr": f"{Decimal(repr(config['optimizer']['lr'])).normalize():f}",
        "measure.callbacks": "-".join(each.rpartition(":")[2] for each in config["measure"].get("callbacks", ())),
        "fault.name": f"{fault['name'].rpartition(':')[2]}-{fault['strength']}",
    }
    for key, usual, text in UNUSUAL:
        group, _, name = key.partition(".")
        if (value := config.get(group, {}).get(name, usual[0])) not in usual:
            parts.append(text.format(said.get(key, value)))
    return slug("-".join(map(str, parts)))[:MAX_NAME]


def _of_ones_own(group: dict[str, Any], key: str) -> str:
    """An option's name, or one's own class: `my_model.workload`."""
    return str(group.get("target") or group[key]).replace(":", ".") if group[key] == "ext" else str(group[key])


def _mesh(config: dict[str, Any]) -> str:
    """dp4; with an outer axis hsdp2x2 or hfsdp2x2 (sharded optimizer); with tensor parallelism dp2tp2."""
    mesh = config["mesh"]
    tp, outer = mesh.get("tp", 1), mesh.get("dp_outer", 1)
    ranks, cut = mesh["world_size"] // tp, f"tp{tp}" if tp > 1 else ""
    if outer == 1:
        return f"dp{ranks}{cut}"
    kind = OuterStrategy[config["sharding"].get("outer", "no_shard")].hybrid
    return f"{kind}{ranks // outer}x{outer}{cut}"


def study_name(config: dict[str, Any]) -> str:
    return str(config["study"]["name"])


def directory_name(config: dict[str, Any]) -> str:
    """`<name>-<sig8>`."""
    return f"{run_name(config)}-{signature(config)[:SHORT]}"
