"""The group `cluster`: facts of the machine that runs a cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from harness.config.number import number


class Backend(Enum):
    local = "local"
    slurm = "slurm"


class Device(Enum):
    """Where a rank computes: cpu with gloo, cuda with NCCL."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass
class ClusterConfig:
    """Facts of the machine. Never part of the signature."""

    backend: Backend = Backend.local
    """Launcher of the ranks: this machine or SLURM."""
    device: Device = Device.cpu
    """Device of a rank: cpu with gloo, or cuda with NCCL."""
    nodes: int = number(1, 1, 2**16, "machines")
    """Machines of a cell; world_size is divided evenly over them."""
    threads_per_rank: int = number(1, 1, 4_096, "threads")
    """Intra-op threads of a rank. Some sums depend on this number, so a verdict requires equal ones."""
    cpus_per_rank: int | None = number(None, 1, 4_096, "processors")
    """Processors per rank that the scheduler is asked for. null: threads_per_rank, and at least 4 on CUDA, where NCCL,
    autograd and the checkpoint writer have threads of their own."""
    ranks_per_device: int = number(1, 1, 64, "ranks")
    """How many neighbouring ranks share a CUDA device (needs NCCL 2.30 or newer), to try several ranks on few devices.
    Their times do not apply to ranks with a device each."""
    bind_to_device: bool = True
    """Bind each CUDA rank to those of its processors that are on the NUMA node of its device."""
    interface: str | None = None
    """Network interface of gloo and NCCL (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), as ip addr shows it.
    null: loopback where all ranks are on one host; else gloo uses the one that leads to rank 0, and NCCL chooses."""
    slots: int = number(2, 1, 2**16, "ranks")
    """Ranks that may run at a time on this machine. A sweep starts cells while slots are free, at least one cell."""
    partition: str | None = None
    """SLURM partition."""
    account: str | None = None
    """SLURM account."""
    qos: str | None = None
    """SLURM quality of service."""
    time_min: int = number(60, 1, 525_600, "minutes")
    """Time limit of one attempt."""
    grace_s: int = number(120, 0, 86_400, "seconds")
    """How long before the time limit a run is asked to save and requeue."""
    mem_gb: float | None = number(None, 0, 10**6, "GB")
    """Memory per node. null: the scheduler decides. 0: all memory, which an exclusive node does not imply."""
    gpus_per_node: int = number(0, 0, 1_024, "devices")
    """Devices per node that the scheduler is asked for."""
    gres: str | None = None
    """Devices per node that the scheduler is asked for with --gres, such as gpu:h100:8, in place of gpus_per_node, if a
    site has no --gpus-per-node."""
    setup: list[str] = field(default_factory=list)
    """Shell lines of the batch script before the ranks (module loads)."""
    teardown: list[str] = field(default_factory=list)
    """Shell lines of the batch script after the ranks, also if these failed. The job keeps the ranks' exit code."""
    array_parallelism: int | None = number(None, 1, 1_000_000, "cells")
    """Cells of a job array that run at a time. null: no limit."""
    sharp_network: str | None = "sharp"
    """Value of sbatch's --network for a cell that uses InfiniBand SHARP. null: the option is left out."""
    flags: list[str] = field(default_factory=list)
    """Further sbatch options without a value, such as exclusive."""
    additional: dict[str, str] = field(default_factory=dict)
    """Further sbatch options, as `name: value`."""
    srun_args: list[str] = field(default_factory=list)
    """Further arguments of the srun that starts the ranks, such as --mpi=none."""
    python: str | None = None
    """Shell words that start Python in a job. null: the path of the interpreter that made the request."""
    container_image: str | None = None
    """Container image of the ranks, as srun's --container-image takes it (pyxis). null: no container."""
    container_mounts: list[str] = field(default_factory=list)
    """Further --container-mounts, each FROM:TO. launch.root is always mounted, at its own path."""
