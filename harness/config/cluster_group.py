"""The group `cluster`: facts of the machine that runs a cell. Part of the typed schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from harness.config.number import number


class Backend(Enum):
    """Who starts the ranks."""

    local = "local"
    slurm = "slurm"


class Device(Enum):
    """Where a rank computes: cpu with gloo, cuda with NCCL."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass
class ClusterConfig:
    """Facts of the machine; never part of the signature."""

    backend: Backend = Backend.local
    """Who starts the ranks."""
    device: Device = Device.cpu
    """Where a rank computes."""
    nodes: int = number(1, 1, 2**16, "machines")
    """Machines a cell uses; world_size is divided evenly over them."""
    threads_per_rank: int = number(1, 1, 4_096, "threads")
    """Intra-op threads of a rank; some sums depend on it, so a verdict checks it."""
    cpus_per_rank: int | None = number(None, 1, 4_096, "processors")
    """Processors the scheduler is asked for per rank; null is threads_per_rank, and at least 4 on CUDA, where NCCL,
    autograd and the writer of checkpoints have threads of their own."""
    ranks_per_device: int = number(1, 1, 64, "ranks")
    """Ranks that share a CUDA device, neighbours on one (NCCL 2.30 or newer): to try what needs several ranks where
    there are few devices. Their times say nothing of ranks that have a device each."""
    bind_to_device: bool = True
    """Keep each CUDA rank to those of its processors that are on its device's side of the machine (NUMA)."""
    interface: str | None = None
    """Network interface that gloo and NCCL meet by (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), as ip addr names it; null:
    gloo takes the one that leads to rank 0, NCCL its own choice."""
    slots: int = number(2, 1, 2**16, "ranks")
    """Ranks that run side by side on this machine; a sweep starts cells while slots are free, one at least."""
    partition: str | None = None
    """SLURM partition."""
    account: str | None = None
    """SLURM account."""
    qos: str | None = None
    """SLURM quality of service."""
    time_min: int = number(60, 1, 525_600, "minutes")
    """Time limit of one attempt, in minutes."""
    grace_s: int = number(120, 0, 86_400, "seconds")
    """Seconds before the limit at which a run is asked to save and requeue."""
    mem_gb: float | None = number(None, 0, 10**6, "GB")
    """Memory a node; null leaves it to the scheduler, 0 asks for all of it, which an exclusive node does not imply."""
    gpus_per_node: int = number(0, 0, 1_024, "devices")
    """Devices asked of the scheduler per node."""
    gres: str | None = None
    """Devices asked of the scheduler per node by --gres, such as gpu:h100:8, where a site knows no --gpus-per-node; in
    place of gpus_per_node."""
    setup: list[str] = field(default_factory=list)
    """Shell lines of the batch script before the ranks (module loads)."""
    teardown: list[str] = field(default_factory=list)
    """Shell lines of the batch script after the ranks, however these ended; the job keeps the ranks' exit code."""
    array_parallelism: int | None = number(None, 1, 1_000_000, "cells")
    """Cells of an array that run at once; null sets no limit."""
    sharp_network: str | None = "sharp"
    """What sbatch's --network asks for where a cell wants InfiniBand SHARP; null asks for nothing."""
    flags: list[str] = field(default_factory=list)
    """Further sbatch options without a value, such as exclusive."""
    additional: dict[str, str] = field(default_factory=dict)
    """Further sbatch options, as `name: value`."""
    srun_args: list[str] = field(default_factory=list)
    """Further words for the srun that starts the ranks, such as --mpi=none."""
    python: str | None = None
    """Shell words that start Python in a job; null is the interpreter of the request, by its path."""
    container_image: str | None = None
    """Image the ranks run in, as srun's --container-image takes it (pyxis); null runs them on the node itself."""
    container_mounts: list[str] = field(default_factory=list)
    """Further --container-mounts, FROM:TO each; launch.root is always mounted, under its own name."""
