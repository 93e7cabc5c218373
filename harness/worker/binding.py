"""Device of a rank, and nearby processors."""

from __future__ import annotations

import os
from pathlib import Path

import torch

PCI = Path("/sys/bus/pci/devices")


def device_index(local_rank: int, ranks_per_device: int, visible: int) -> int:
    """CUDA device index of a rank; neighbouring ranks share one.

    Args: visible: devices of this process; a scheduler with one each (srun --gpus-per-task) shows every rank its own as
    number 0.

    Raises `ValueError`: there are too few devices.
    """
    index = 0 if visible == 1 else local_rank // ranks_per_device
    if index < visible:
        return index
    least = -(-(local_rank + 1) // visible) if visible else 1
    raise ValueError(
        f"local rank {local_rank} would compute on CUDA device {index}, and this process sees {visible}"
        f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); ask for as many devices as ranks,"
        f" or let ranks share them with cluster.ranks_per_device={least}, or set cluster.device=cpu"
    )


def near(device: int, folder: Path = PCI) -> set[int]:
    """Processors on the NUMA node of a CUDA device; empty if unknown."""
    facts = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(facts, name, None) for name in names]
    if None in numbers:
        return set()
    domain, bus, slot = numbers
    return processors_of(folder / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist")


def processors_of(path: Path) -> set[int]:
    """A kernel's list of processors, such as 0-3,8; empty where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def bind(processors: set[int]) -> None:
    """Restrict this process and its future threads to these processors, as far as allowed; no-op if none is left."""
    both = processors & os.sched_getaffinity(0)
    if both:
        os.sched_setaffinity(0, both)
