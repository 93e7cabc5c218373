"""A group of ranks of one host that map each other's memory."""

from __future__ import annotations

import os
import socket
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.private_torch import backend_of, timeout_of
from harness.shm.segment import Segment, head_bytes, open_peer
from harness.shm.transfer import Peer, ShmGroup


def shared(group: dist.ProcessGroup, capacity: int | None = None) -> tuple[ShmGroup | None, str]:
    """A group of these ranks; or None and the reason, the same on all ranks, why there is none. *Collective.*

    capacity: of each rank's segment, in bytes; None: all memory of the host, of which nothing is used at first.
    """
    gloo, rank, size = backend_of(group, torch.device("cpu")), group.rank(), group.size()
    if size == 1:
        return None, "one rank"
    segment, reason = None, ""
    try:
        segment = Segment(head_bytes(size), capacity)
    except (OSError, AttributeError, RuntimeError) as error:
        reason = f"shared memory could not be made: {error}"
    mine = [_host(), os.getpid(), *((segment.file, segment.size, segment.token) if segment is not None else (-1, 0, 0))]
    rows = torch.empty(size, len(mine), dtype=torch.int64)
    gloo.allgather([list(rows)], [torch.tensor(mine)]).wait()
    if not reason and len(set(rows[:, 0].tolist())) > 1:
        reason = "the ranks are on several hosts, or in several PID namespaces"
    peers: dict[int, Peer] = {}
    if segment is not None and not reason and int(rows[:, 2].min()) >= 0:
        try:
            for peer, (_, pid, file, length, token) in enumerate(rows.tolist()):
                if peer != rank:
                    memory, inode = open_peer(pid, file, length, token)
                    peers[peer] = Peer(pid, file, inode, memory)
        except (OSError, RuntimeError) as error:
            reason = f"shared memory of a peer could not be mapped: {error}"
    if why := _agreed(gloo, rank, size, reason):
        return None, why
    assert segment is not None
    return ShmGroup(rank, segment, peers, lambda: timeout_of(gloo)), ""


def _agreed(gloo: Any, rank: int, size: int, reason: str) -> str:
    """The first rank's reason, of those that have one; "" if none has. *Collective.*"""
    words = reason.encode()[:500]
    rows = torch.zeros(size, 501, dtype=torch.uint8)
    mine = torch.zeros(501, dtype=torch.uint8)
    mine[: len(words)] = torch.tensor(list(words), dtype=torch.uint8)
    gloo.allgather([list(rows)], [mine]).wait()
    for number, row in enumerate(rows):
        if message := bytes(row.tolist()).rstrip(b"\0").decode(errors="replace"):
            return f"rank {number}: {message}"
    return ""


def _host() -> int:
    """A number that two processes share if one can name the other by its process id."""
    boot, namespace = socket.gethostname(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return zlib.crc32(f"{boot} {namespace}".encode())
