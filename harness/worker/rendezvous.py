"""Rendezvous of ranks: rank 0 leaves a key and a store's address in a folder that only its user can enter.

[Note: Who is believed] The ports of gloo, NCCL and torch's TCPStore ask for no password. Ranks on one host need no port
to meet: their store is a file of that folder, and later ports are on loopback. Ranks on several hosts share the folder
and meet in a TCPStore, whose values are believed. Pickles are signed with the key (`sign_pickles`). Key and
folder are of one start.
"""

from __future__ import annotations

import hmac
import json
import os
import pickle
import secrets
import socket
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from torch.distributed import FileStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined] # undeclared

from harness.store.commands import page
from harness.store.errors import StoreError
from harness.store.files import PRIVATE
from harness.store.rank_place import RankPlace, rendezvous_folder
from harness.store.reading import read_json

ADDRESS, STORE = "address.json", "store"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Store and host of one start.

    host: address of rank 0 for all ranks; `LOOPBACK` on one host.
    """

    store: Store
    signer: Signer
    host: str


def meet(attempt: Path, place: RankPlace, *, timeout_s: float, environment: Mapping[str, str] = os.environ) -> Meeting:
    """Store shared by all ranks of this start. Collective over them.

    Raises `TimeoutError`: rank 0 has not published within `timeout_s` seconds. `StoreError`: other users can enter the
    attempt's folder. `ValueError`: the ranks have no start in common.
    """
    if not place.start:
        raise ValueError(f"{place.launcher} started these ranks, and they know no common start: let it start run.py")
    _check_private(attempt)
    folder, limit = rendezvous_folder(attempt, place.start), timedelta(seconds=timeout_s)
    if place.rank == 0:
        folder.mkdir(mode=0o700)
        host, key = reachable_host(place, environment), secrets.token_bytes(KEY_BYTES)
        served = None if is_one_host(place, environment) else _serve(host, place.world_size, limit)
        _publish(folder / ADDRESS, {"key": key.hex(), "host": host, "port": served and served.port})
    else:
        found = _await_address(folder / ADDRESS, place, timeout_s)
        host, port, key = found["host"], found["port"], bytes.fromhex(found["key"])
        served = port and TCPStore(host, port, place.world_size, is_master=False, timeout=limit)
    signer = Signer(key)
    store = served or FileStore(str(folder / STORE), place.world_size)
    store.set_timeout(limit)
    return Meeting(store, signer, host)


def _check_private(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StoreError(
            f"{folder} (user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}) is to be yours alone, mode 700: the"
            " ranks leave there what they know each other by. Put launch.root on a file system that keeps modes"
        )


def _publish(path: Path, address: Mapping[str, Any]) -> None:
    """Not by `write_atomic`, which replaces secrets."""
    temporary = path.with_suffix(".part")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w", encoding="utf-8") as file:
        json.dump(address, file)
    os.replace(temporary, path)


def _serve(host: str, world_size: int, limit: timedelta) -> TCPStore:
    listener = socket.create_server((host, 0), backlog=max(128, world_size))
    return TCPStore(
        host,
        int(listener.getsockname()[1]),
        world_size,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,  # the others cannot come before the address is published
        master_listen_fd=listener.detach(),
    )


def _await_address(path: Path, place: RankPlace, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        published: dict[str, Any] | None = read_json(path, own=True)
        if published is not None:
            return published
        time.sleep(0.02)
    raise TimeoutError(f"rank {place.rank} waited {timeout_s:g} s for rank 0 to publish {path}; see rank 0's log")


def is_one_host(place: RankPlace, environment: Mapping[str, str]) -> bool:
    """True if all ranks of this start are known to be on this machine."""
    if place.launcher == "torchrun":
        return environment.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.launcher != "slurm" or environment.get("SLURM_STEP_NUM_NODES", "1") == "1"


def reachable_host(place: RankPlace, environment: Mapping[str, str]) -> str:
    """Address of this machine for every rank: loopback on one host; else SLURM's node name, or under torchrun the
    address towards MASTER_ADDR.

    Raises `ValueError`: torchrun's MASTER_ADDR is missing, or unreachable.
    """
    if is_one_host(place, environment):
        return LOOPBACK
    if place.launcher == "slurm":
        return socket.gethostbyname(_node_address(environment["SLURMD_NODENAME"]) or socket.gethostname())
    master = environment.get("MASTER_ADDR", "")
    address = _address_towards(master) if master else None
    if address is None:
        raise ValueError(
            f"MASTER_ADDR={master!r} leads nowhere, and the ranks are on several machines (LOCAL_WORLD_SIZE="
            f"{environment.get('LOCAL_WORLD_SIZE')}, WORLD_SIZE={place.world_size}): set it to rank 0's address"
        )
    return address


def _node_address(node: str) -> str:
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((word[len("NodeAddr=") :] for word in text.split() if word.startswith("NodeAddr=")), "")


def interface_towards(host: str) -> str | None:
    """Interface through which this machine reaches `host`, for gloo; None if unknown."""
    import psutil

    address = _address_towards(host)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _address_towards(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # no packet is sent: connecting a datagram socket only looks up the route
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return address


KEY_BYTES = 32
_PROOF_BYTES = 32


class NotOfThisStart(RuntimeError):
    """Bytes from no rank of this start: somebody else answers in the place of a rank."""


class Signer:
    """Args: key: `KEY_BYTES` random bytes, of this start alone."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def signed(self, value: bytes) -> bytes:
        return self._proof(value) + value

    def verified(self, signed: bytes) -> bytes:
        """Value signed by some rank.

        Raises `NotOfThisStart`: it is forged, cut, or of another start.
        """
        proof, value = signed[:_PROOF_BYTES], signed[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(value)):
            raise NotOfThisStart(
                "a pickle was not written by a rank of this run: another user of this network answers in the place of a"
                f" rank, and nothing of it was used. See {page('security.md')}"
            )
        return value

    def _proof(self, value: bytes) -> bytes:
        return hmac.digest(self._key, value, "sha256")


def sign_pickles(signer: Signer) -> None:
    """Make torch's object collectives of this process sign their pickles, and read nothing else.

    DCP, torch's FSDP and other engines pickle over open sockets. Raises `RuntimeError`: this torch pickles in another
    way.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(signer.signed(pickle.dumps(value)))

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(signer.verified(self._file.read()))

    for name, ours in {"_pickler": Pickler, "_unpickler": Unpickler}.items():
        if not hasattr(distributed_c10d, name):
            raise RuntimeError(f"distributed_c10d has no {name}: this torch's pickles cannot be signed")
        setattr(distributed_c10d, name, ours)
