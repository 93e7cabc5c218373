"""What a rank that is started on this machine is given beside what its configuration says."""

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
    """Variables of one rank started on this machine.

    Args:
        config: the cell.
        rank: global rank; on one machine also the local one.
        start: token of this start.
        devices: CUDA devices the cell may use, one for each cluster.ranks_per_device ranks; empty on CPU.
        attempt: folder of the attempt, for logs.
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
    """A whole environment: the parent's, without another launcher's ranks, with ours, able to import this package."""
    kept = {name: value for name, value in parent.items() if name not in FOREIGN}
    return kept | {"PYTHONPATH": python_path(parent)} | dict(variables)


def python_path(parent: Mapping[str, str]) -> str:
    """A search path that finds the very package the desk runs, before any other installed copy."""
    own = str(PACKAGE.parent)
    others = [entry for entry in parent.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != own]
    return os.pathsep.join([own, *others])
