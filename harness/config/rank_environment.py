"""Environment of a rank, with NCCL, torch's NCCL backend and the SHARP library: pure functions of a configuration.

Some variables are read at process start, and only the launcher can set them. The rest are read when torch is loaded, so
that a rank under torchrun or srun can set them itself. CUDA devices of this machine are counted without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.config.derived import wants_infiniband_sharp
from harness.config.schema import Config, CtaPolicy, Device, NcclLog, Numerics, Registration, SharpAxis

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

CTA_POLICIES = {CtaPolicy.default: "0", CtaPolicy.efficiency: "1", CtaPolicy.zero: "2"}
"""Values as numbers, because names are understood from NCCL 2.29 on."""


SHARED_DEVICE_CTAS = 2
"""Most thread blocks of a collective with several ranks on a device; nccl_ub.max_ctas overrides it."""


def network_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables of NCCL, torch and SHARP; empty on CPU."""
    if config.cluster.device is not Device.cuda:
        return {}
    parts = (_algorithms, _thread_blocks, _shared_devices, _sharp_library)
    return {name: value for part in parts for name, value in part(config).items()} | _log(config, attempt)


def _algorithms(config: Config) -> dict[str, str]:
    """[Note: Left alone] `sharp=default` sets nothing, so that a run is as without this harness.

    NCCL uses NVLS at will, and the user's exports stand. But a promised order of arithmetic excludes sums in switches,
    and ranks that share a device cannot have them.
    """
    sharp = config.sharp
    nvlink = sharp.group.is_asked and sharp.nvlink
    variables = {}
    if sharp.group is not SharpAxis.default or config.numerics.mode is not Numerics.fast:
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
    if ub.mode is not Registration.none:
        # torch would register every tensor of every collective by itself, beside the engine's pool
        variables["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"
    return variables


def _shared_devices(config: Config) -> dict[str, str]:
    """Several ranks on a device, as NCCL 2.30 allows: no multicast, and few thread blocks each.

    A rank whose collective fills the device leaves no room for its peer.
    """
    if config.cluster.ranks_per_device == 1:
        return {}
    most = SHARED_DEVICE_CTAS if config.nccl_ub.max_ctas is None else config.nccl_ub.max_ctas
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": str(most)}


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


DRIVER_FILES = Path("/dev")


def visible_devices(environment: Mapping[str, str] = os.environ, folder: Path = DRIVER_FILES) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES, or numbers from 0 on.

    CUDA counts the devices it can open from 0 (a container with /dev/nvidia3 alone has device 0), so files are counted.
    It stops reading the variable at the first invalid entry.

    Args: folder: of the driver's device files.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        named = []
        for entry in (entry.strip() for entry in chosen.split(",")):
            if not entry or entry.startswith("-") or entry == "NoDevFiles":
                break
            named.append(entry)
        return named
    files = [path for path in folder.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    return [str(number) for number in range(len(files))]
