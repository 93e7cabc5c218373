"""Rendezvous of ranks, by stores of torch: a file on one host, torchrun's own, or one at a port of rank 0.

docs/security.md says who is believed.
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

from torch.distributed import FileStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined] # undeclared

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
