"""What environment a rank needs: pure functions from a configuration to variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.config.derived import wants_infiniband_sharp
from harness.config.schema import Config, CtaPolicy, Device, NcclLog, Numerics, SharpAxis, UserBuffers
from harness.store.placement import FOREIGN, START
from harness.store.provenance import PACKAGE

HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Bytes from which on glibc maps a block by itself, and hands free memory back to the kernel.

Engines free and take buckets all the time; with glibc's own thresholds each of them may cost its pages anew.
"""


NCCL_LOG = "nccl.%h.%p.log"
"""Name of a rank's NCCL log in the attempt's folder; NCCL puts host and process in."""

CTA_POLICIES = {CtaPolicy.default: "0", CtaPolicy.efficiency: "1", CtaPolicy.zero: "2"}
"""By number: names are understood from NCCL 2.29 on."""


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


def network_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """What NCCL, torch's face of it and the SHARP library are told; nothing on CPU, where gloo takes no such wish."""
    if config.cluster.device is not Device.cuda:
        return {}
    return _algorithms(config) | _thread_blocks(config) | _sharp_library(config) | _log(config, attempt)


def _algorithms(config: Config) -> dict[str, str]:
    sharp = config.sharp
    nvlink = sharp.group is not SharpAxis.none and sharp.nvlink
    variables = {
        # 2 is "where the devices have it"; 1 would claim it of any device and fail while a communicator is made
        "NCCL_NVLS_ENABLE": "2" if nvlink else "0",
        # NCCL reads this for each communicator anew: whoever creates the one that owns SHARP raises it meanwhile
        "NCCL_COLLNET_ENABLE": "0",
    }
    if sharp.algo is not None:
        variables["NCCL_ALGO"] = sharp.algo
    if nvlink and sharp.nvls_ctas is not None:
        variables["NCCL_NVLS_NCHANNELS"] = str(sharp.nvls_ctas)
    return variables


def _thread_blocks(config: Config) -> dict[str, str]:
    ub = config.nccl_ub
    variables = {}
    if ub.cta_policy is not CtaPolicy.default:
        variables["NCCL_CTA_POLICY"] = CTA_POLICIES[ub.cta_policy]
    if ub.min_ctas is not None:
        variables["NCCL_MIN_CTAS"] = str(ub.min_ctas)
    if ub.max_ctas is not None:
        variables["NCCL_MAX_CTAS"] = str(ub.max_ctas)
    if ub.mode is not UserBuffers.none:
        # torch would register every tensor of every collective by itself, beside the engine's pool
        variables["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"
    return variables


def _sharp_library(config: Config) -> dict[str, str]:
    if not wants_infiniband_sharp(config):
        return {}
    variables = {"SHARP_COLL_ENABLE_SAT": str(int(config.sharp.streaming))}
    if config.sharp.overlap_gather:
        variables["SHARP_COLLNET_OVERLAP_AG"] = "1"
    if config.launch.nccl_log is not NcclLog.none:
        variables["SHARP_COLL_LOG_LEVEL"] = "3"  # information: whether the switches gave the job a tree
    return variables


def _log(config: Config, attempt: Path | None) -> dict[str, str]:
    """A log of NCCL's own, so that what it really did can be read back; the user's own settings stand without one."""
    if config.launch.nccl_log is NcclLog.none or attempt is None:
        return {}
    kinds = ["INIT", "ENV", "NET", "GRAPH", "NVLS", "REG"]
    if config.launch.nccl_log is NcclLog.choices:
        kinds.append("TUNING")
    folder = str(attempt.absolute()).replace("%", "%%")
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": ",".join(kinds),
        "NCCL_DEBUG_FILE": f"{folder}/{NCCL_LOG}",
    }


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
