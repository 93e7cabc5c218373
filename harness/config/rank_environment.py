"""Environment of a rank, with NCCL, torch's NCCL backend and the SHARP library: pure functions of a configuration.

Some variables are read at process start, and only the launcher can set them. The rest are read when torch is loaded, so
that a rank under torchrun or srun can set them itself.
"""

from __future__ import annotations

from pathlib import Path

from harness.config.derived import wants_infiniband_sharp
from harness.config.schema import Config, Device, NcclLog, Numerics, Registration, SharpAxis

HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Size from which glibc maps a block by itself, and returns free memory to the kernel.

Engines free and take buckets all the time; with glibc's own thresholds each may cost its pages anew.
"""


def run_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables of every rank of a cell.

    Args: attempt: folder of logs; None logs nothing (a preview, a process that only imports).
    """
    of_the_process = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **HEAP}
    return of_the_process | library_environment(config, attempt)


def library_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    threads = str(config.cluster.threads_per_rank)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if config.cluster.device is Device.cuda and config.numerics.mode is not Numerics.fast:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reruns alike only with a fixed workspace
    if config.cluster.interface is not None:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), config.cluster.interface)
    return variables | network_environment(config, attempt)


NCCL_LOG = "nccl.%h.%p.log"

SHARED_DEVICE_CTAS = 2
"""Most thread blocks of a collective with several ranks on a device."""


def network_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables of NCCL, torch and SHARP; empty on CPU.

    [Note: Left alone] `sharp=default` sets nothing, so that a run is as without this harness: NCCL uses NVLS at will,
    and the user's exports stand. But a promised order of arithmetic excludes sums in switches. Several ranks on one
    device (NCCL 2.30) have no multicast, and few thread blocks each: one whose collective fills the device leaves no
    room for its peer.
    """
    if config.cluster.device is not Device.cuda:
        return {}
    sharp, ub, log = config.sharp, config.nccl_ub, config.launch.nccl_log
    is_decided = sharp.group is not SharpAxis.default or config.numerics.mode is not Numerics.fast
    nvlink, shares = sharp.group.is_asked and sharp.nvlink, config.cluster.ranks_per_device > 1
    chosen: dict[str, object] = {
        # 2 is "where the devices have it"; 1 would claim it of any device and fail while a communicator is made
        "NCCL_NVLS_ENABLE": 0 if shares else (2 if nvlink else 0) if is_decided else None,
        # NCCL reads this for each communicator anew: whoever creates the one that owns SHARP raises it meanwhile
        "NCCL_COLLNET_ENABLE": 0 if is_decided else None,
        "NCCL_MAX_CTAS": SHARED_DEVICE_CTAS if shares else None,
        "NCCL_MULTI_RANK_GPU_ENABLE": 1 if shares else None,
        # torch would register every tensor of every collective by itself, beside the engine's pool
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": None if ub.mode is Registration.none else 0,
    }
    if wants_infiniband_sharp(config):
        chosen["SHARP_COLL_ENABLE_SAT"] = int(sharp.streaming)
        # 3 tells whether the switches gave the job a tree
        chosen["SHARP_COLL_LOG_LEVEL"] = None if log is NcclLog.none else 3
    if log is not NcclLog.none and attempt is not None:
        kinds = "INIT,ENV,NET,GRAPH,NVLS,REG" + ",TUNING" * (log is NcclLog.choices)
        file = f"{str(attempt.absolute()).replace('%', '%%')}/{NCCL_LOG}"
        chosen |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": kinds, "NCCL_DEBUG_FILE": file}
    return {name: str(value) for name, value in chosen.items() if value is not None}
