"""What environment a rank needs: pure functions from a configuration to variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.config.network_variables import network_environment
from harness.config.schema import Config, Device, Numerics
from harness.store.placement import FOREIGN, START
from harness.store.provenance import PACKAGE

HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Bytes from which on glibc maps a block by itself, and hands free memory back to the kernel.

Engines free and take buckets all the time; with glibc's own thresholds each of them may cost its pages anew.
"""


def run_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables every rank of a cell gets, wherever it runs.

    Args:
        config: the cell.
        attempt: folder of the attempt, for logs; None logs nothing (a preview, a process that only imports).
    """
    threads = str(config.cluster.threads_per_rank)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **HEAP,
    }
    if config.cluster.device is Device.cuda and config.numerics.mode is not Numerics.fast:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reruns alike only with a fixed workspace
    return variables | network_environment(config, attempt)


def rank_environment(
    config: Config, rank: int, *, start: str, devices: tuple[str, ...] = (), attempt: Path | None = None
) -> dict[str, str]:
    """Variables of one rank started on this machine.

    Args:
        config: the cell.
        rank: global rank; on one machine also the local one.
        start: token of this start.
        devices: CUDA devices the cell may use, one a rank; empty on CPU.
        attempt: folder of the attempt, for logs.
    """
    variables = run_environment(config, attempt) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.mesh.world_size),
        "GLOO_SOCKET_IFNAME": loopback(),
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


def loopback() -> str:
    """Name of the loopback interface."""
    return "lo0" if os.uname().sysname == "Darwin" else "lo"
