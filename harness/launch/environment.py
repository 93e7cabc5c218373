"""Environment of a rank on this machine, beyond its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.config.rank_environment import run_environment
from harness.config.schema import Config
from harness.store.provenance import PACKAGE
from harness.store.rank_place import FOREIGN, START


def rank_environment(
    config: Config, rank: int, *, start: str, devices: tuple[str, ...] = (), attempt: Path | None = None
) -> dict[str, str]:
    """Variables of one rank on this machine.

    Args: rank: global and local rank. start: token of this start. devices: one for each cluster.ranks_per_device ranks;
    empty on CPU. attempt: folder of logs.
    """
    variables = run_environment(config, attempt) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.mesh.world_size),
        START: start,
    }
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return variables


def child_environment(variables: Mapping[str, str], parent: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in parent.items() if name not in FOREIGN}
    return kept | {"PYTHONPATH": python_path(parent)} | dict(variables)


def python_path(parent: Mapping[str, str]) -> str:
    own = str(PACKAGE.parent)
    others = [entry for entry in parent.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != own]
    return os.pathsep.join([own, *others])
