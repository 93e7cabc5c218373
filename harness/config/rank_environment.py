"""Environment of a rank: pure functions from a configuration to variables.

Some are read at process start, and only the launcher can set them. The rest are read when torch is loaded, so that a
rank under torchrun or srun can set them itself.
"""

from __future__ import annotations

from pathlib import Path

from harness.config.network_variables import network_environment
from harness.config.schema import Config, Device, Numerics

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
