"""How ranks find each other without a port chosen beforehand: rank 0 binds one and publishes it for this start."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store.files import write_json
from harness.store.rank_place import RankPlace
from harness.store.reading import read_json

if TYPE_CHECKING:
    # torch exports its stores without declaring them
    from torch.distributed import Store  # type: ignore[attr-defined]

FILE = "rendezvous.json"
LOOPBACK = "127.0.0.1"


def meet(
    attempt: Path, place: RankPlace, *, timeout_s: float, environment: Mapping[str, str] = os.environ
) -> tuple[Store, str]:
    """A store all ranks of this start share, and the host it is reached by. *Collective.*

    Rank 0 binds a free port on the interface the others reach it by, and only then publishes host and port under this
    start's token, so that no port is guessed and no older start's address is believed.

    Raises:
        TimeoutError: rank 0 has not published within `timeout_s` seconds.
    """
    if place.rank == 0:
        host = reachable_host(place, environment)
        listener = socket.create_server((host, 0), backlog=max(128, place.world_size))
        port = int(listener.getsockname()[1])
        store = _serve(host, port, listener, place.world_size, timeout_s)
        write_json(attempt / FILE, {"start": place.start, "host": host, "port": port})
        return store, host
    host, port = _await_address(attempt / FILE, place, timeout_s)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, place.world_size, is_master=False, timeout=timedelta(seconds=timeout_s)), host


def _serve(host: str, port: int, listener: socket.socket, world_size: int, timeout_s: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,  # the others cannot come before the address is published
        master_listen_fd=listener.detach(),
    )


def _await_address(path: Path, place: RankPlace, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        published = read_json(path)
        if published is not None and published["start"] == place.start:
            return published["host"], published["port"]
        time.sleep(0.02)
    raise TimeoutError(f"rank {place.rank} waited {timeout_s:g} s for rank 0 to publish {path}; see rank 0's log")


def reachable_host(place: RankPlace, environment: Mapping[str, str]) -> str:
    """An address of this machine that every rank reaches: loopback on one, else the one SLURM knows the node by."""
    if place.launcher != "slurm" or environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return LOOPBACK
    name = _node_address(environment["SLURMD_NODENAME"]) or socket.gethostname()
    return socket.gethostbyname(name)


def _node_address(node: str) -> str:
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((word[len("NodeAddr=") :] for word in text.split() if word.startswith("NodeAddr=")), "")


def interface_towards(host: str) -> str | None:
    """Name of the interface this machine reaches `host` by; None where it cannot be told. gloo is given this one."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # no packet is sent: connecting a datagram socket only looks up the route
        except OSError:
            return None
        address = probe.getsockname()[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
