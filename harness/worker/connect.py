"""Device, threads, and the default process group of a rank.

Ranks meet by stores of torch: a file on one host, torchrun's own, or one at a port of rank 0. docs/security.md says who
is believed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined] # undeclared

from harness.config.derived import wants_infiniband_sharp
from harness.config.schema import Config, Device, MeasureMode, Numerics, SharpAxis
from harness.engines.protocol import Ranks
from harness.fsdp import with_sharp
from harness.probe.meters import note_before_rendezvous
from harness.store.files import write_json
from harness.store.rank_place import RankPlace, rendezvous_file
from harness.store.reading import read_json

LOOPBACK = "127.0.0.1"


def meet(
    attempt: Path, place: RankPlace, *, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[Store, str]:
    """Store shared by all ranks of this start, and the host of rank 0: `LOOPBACK` on one. Collective over them.

    Raises `TimeoutError`: rank 0 has not published its port within `timeout_s` seconds. `ValueError`: a variable of
    torchrun is missing.
    """
    path, limit = rendezvous_file(attempt, place.start), timedelta(seconds=timeout_s)
    store: Store
    if is_one_host(place, environment):
        store, host = FileStore(str(path), place.world_size), LOOPBACK
    elif place.launcher == "torchrun":
        (store, _, _), host = next(rendezvous("env://", timeout=limit)), environment["MASTER_ADDR"]
    elif place.rank == 0:
        host = _own_address(environment)
        # the others cannot come before the port is published
        store = served = TCPStore(host, 0, place.world_size, is_master=True, timeout=limit, wait_for_workers=False)
        write_json(path, {"host": host, "port": served.port})
    else:
        deadline = time.monotonic() + timeout_s
        while (found := read_json(path)) is None:
            if time.monotonic() >= deadline:
                what = f"waited {timeout_s:g} s for rank 0 to publish {path}; see rank 0's log"
                raise TimeoutError(f"rank {place.rank} {what}")
            time.sleep(0.02)
        host = found["host"]
        store = TCPStore(host, found["port"], place.world_size, is_master=False, timeout=limit)
    store.set_timeout(limit)
    return store, host


def _own_address(environment: Mapping[str, str]) -> str:
    """Address that SLURM has of this node; a node's own name may lead to its loopback (Debian's 127.0.1.1)."""
    node = environment.get("SLURMD_NODENAME", "")
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout if node else ""
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return socket.gethostbyname(found[1] if found else socket.gethostname())


def is_one_host(place: RankPlace, environment: Mapping[str, str]) -> bool:
    """True if all ranks of this start are known to be on this machine."""
    if place.launcher == "torchrun":
        return bool(place.start) and environment.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.launcher != "slurm" or environment.get("SLURM_STEP_NUM_NODES", "1") == "1"


def interface_towards(host: str) -> str | None:
    """Interface through which this machine reaches `host`, for gloo; None if unknown."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # no packet is sent: connecting a datagram socket only looks up the route
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


MEETING_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other at the start: nodes load the environment at very different speeds."""

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def set_up_torch(config: Config, place: RankPlace) -> torch.device:
    """Set threads and determinism, and return the device; on CUDA also disable TF32.

    Raises `RuntimeError`, torch's: this process sees no such CUDA device.
    """
    torch.set_num_threads(config.cluster.threads_per_rank)
    if config.numerics.mode is not Numerics.fast:
        torch.use_deterministic_algorithms(True)
        # torch then fills memory that is only taken: that shows who reads it too soon, and is no part of a step's time
        fills = config.measure.mode is not MeasureMode.bench
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined] # torch leaves it untyped
    if config.cluster.device is not Device.cuda:
        return torch.device("cpu")
    device = torch.device("cuda", device_index(place.local_rank, config.cluster.ranks_per_device))
    torch.cuda.set_device(device)
    # TF32 has 10 bits where fp32 has 23. torch leaves it off in matrix products, but on in convolutions.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    note_before_rendezvous(device)
    return device


def join(config: Config, place: RankPlace, attempt: Path, device: torch.device) -> Ranks:
    """Join the default group. Collective over all ranks.

    The group's own timeout exceeds the hang watch: a hang is reported with every rank's stack, not as a timeout.
    """
    if not wants_infiniband_sharp(config):
        _create(config, place, attempt, device)
    elif config.sharp.group is SharpAxis.dp and config.mesh.dp_outer == 1:  # the default one is that of the inner axis
        with_sharp(lambda: _create(config, place, attempt, device), device)
    else:
        # The owner is one of the axes' communicators, which the engine creates first: the default one comes to be with
        # its first collective, later, and without SHARP.
        _create(config, place, attempt, device, at_once=False)
    return Ranks(place.rank, place.world_size, place.local_rank, device, config.mesh.tp)


def _create(config: Config, place: RankPlace, attempt: Path, device: torch.device, *, at_once: bool = True) -> Any:
    """Create the default group and return it."""
    common: dict[str, Any] = {
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "timeout": timedelta(seconds=max(1800.0, 2 * config.launch.hang_timeout_s)),
        "device_id": device if device.type == "cuda" and at_once else None,
    }
    store = _store(config, place, attempt)
    dist.init_process_group(store=store, rank=place.rank, world_size=place.world_size, **common)
    return dist.group.WORLD


def _store(config: Config, place: RankPlace, attempt: Path) -> Store:
    store: Store = HashStore()
    host = LOOPBACK
    if place.world_size > 1:
        store, host = meet(attempt, place, timeout_s=MEETING_TIMEOUT_S)
    if config.cluster.interface is None:
        _choose_interfaces(host)
    return store


def _choose_interfaces(host: str) -> None:
    """Make gloo and NCCL listen on loopback where all ranks are on one host, whatever variables say.

    Over hosts, gloo uses the interface that leads to rank 0, unless a variable names one; host names often lead
    elsewhere.
    """
    interface = interface_towards(host)
    if interface is None:
        return
    if host == LOOPBACK:
        os.environ[GLOO_INTERFACE] = os.environ[NCCL_INTERFACE] = interface
    else:
        os.environ.setdefault(GLOO_INTERFACE, interface)


def abandon() -> None:
    """Drop the default group of a rank inside its launcher, without peers."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(ranks: Ranks, met_in: Path) -> None:
    """Leave the default group after a barrier, so that no rank takes another's end for a fault. Collective over all
    ranks.

    met_in: file of their rendezvous, which rank 0 removes.
    """
    if ranks.world_size > 1:
        dist.barrier()
    dist.destroy_process_group()
    if ranks.rank == 0:
        met_in.unlink(missing_ok=True)


def device_index(local_rank: int, ranks_per_device: int) -> int:
    """CUDA device index of a rank; neighbouring ranks share one.

    A scheduler with one device each (srun --gpus-per-task) shows every rank its own as number 0.
    """
    return 0 if torch.cuda.device_count() == 1 else local_rank // ranks_per_device
