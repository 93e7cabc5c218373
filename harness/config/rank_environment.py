"""What environment a rank needs: pure functions from a configuration to variables.

Some are read when a process starts, and only its launcher can give them; the rest are read when torch and what it
brings are loaded, so that a process which somebody else has started (torchrun, srun) can still give them to itself.
"""

from __future__ import annotations

from pathlib import Path

from harness.config.network_variables import network_environment
from harness.config.schema import Config, Device, Numerics

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
    of_the_process = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **HEAP}
    return of_the_process | library_environment(config, attempt)


def library_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables that libraries read when they are loaded or first used, of a rank of this cell."""
    threads = str(config.cluster.threads_per_rank)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if config.cluster.device is Device.cuda and config.numerics.mode is not Numerics.fast:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reruns alike only with a fixed workspace
    if config.cluster.interface is not None:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), config.cluster.interface)
    return variables | network_environment(config, attempt)
