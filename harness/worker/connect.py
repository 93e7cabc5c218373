"""From a place to a member of a process group: device, threads, and the group all ranks share."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# torch exports its stores without declaring them
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from harness.config.schema import Config, Device, Numerics
from harness.engines.protocol import Ranks
from harness.store.placement import Placement
from harness.worker.rendezvous import interface_towards, meet

MEETING_TIMEOUT_S = 600.0
"""How long ranks wait for each other at the start: nodes load the environment at very different speeds."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def set_up_torch(config: Config, place: Placement) -> torch.device:
    """Threads, determinism and device of this process."""
    torch.set_num_threads(config.cluster.threads_per_rank)
    if config.numerics.mode is not Numerics.fast:
        torch.use_deterministic_algorithms(True)
    if config.cluster.device is not Device.cuda:
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def join(config: Config, place: Placement, attempt: Path, device: torch.device) -> Ranks:
    """Become a member of the default group. *Collective.*

    The group's own timeout stays beyond the hang watch: a hang is reported with every rank's stack, not as a timeout.
    """
    timeout = timedelta(seconds=max(1800.0, 2 * config.launch.hang_timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if place.launcher == "torchrun":
        _prefer_interface(os.environ["MASTER_ADDR"])
        dist.init_process_group(backend, init_method="env://", timeout=timeout, device_id=bound)
    else:
        dist.init_process_group(
            backend,
            store=_store(place, attempt),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=bound,
        )
    return Ranks(place.rank, place.world_size, place.local_rank, device)


def _store(place: Placement, attempt: Path) -> Store:
    if place.world_size == 1:
        return HashStore()
    store, host = meet(attempt, place, timeout_s=MEETING_TIMEOUT_S)
    _prefer_interface(host)
    return store


def _prefer_interface(host: str) -> None:
    """Let gloo use the interface that leads to rank 0, unless the user chose one; host names often lead elsewhere."""
    interface = interface_towards(host)
    if interface is not None:
        os.environ.setdefault(GLOO_INTERFACE, interface)


def abandon() -> None:
    """Drop the default group of a rank that lives on after its run: the one inside its launcher, which has no peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(ranks: Ranks) -> None:
    """Leave the default group after all ranks have come here, so that none takes the end of another for a fault."""
    if ranks.world_size > 1:
        dist.barrier()
    dist.destroy_process_group()
