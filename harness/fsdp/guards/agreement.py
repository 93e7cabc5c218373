"""Whether all ranks were told the same: compared by one number a rank, and spelled out only where it differs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import torch

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.guards.watches import by_value, ranks_text

Told = Sequence[tuple[str, str]]
"""Pairs of what is spoken of ("parameter blocks.0.weight"), and what is said of that."""


class RanksDisagree(RuntimeError):
    """Ranks were given different arguments or settings. All ranks raise it with the same message."""


def check_agreed(told: Told, comm: Communicator, purpose: str, wrong: str, fix: str) -> None:
    """Compare what the ranks of a group say of parameters or buffers. *Collective.*

    Args:
        told: by this rank. purpose: for the label. wrong, fix: what to say around the first difference.

    Raises:
        RanksDisagree: on all ranks, with the first name that differs and who says what of it.
    """
    if comm.size == 1:
        return
    table = torch.zeros(comm.size, dtype=torch.int64, device=comm.runtime.device)
    table[comm.rank] = zlib.crc32("\n".join(f"{name}\t{what}" for name, what in told).encode())
    if len(set(comm.sum_scalars(table, purpose).tolist())) == 1:
        return
    raise RanksDisagree(f"{wrong}: {difference(_everyones(told, comm, purpose))}. {fix}")


def _everyones(told: Told, comm: Communicator, purpose: str) -> list[Told]:
    """What each rank was told, by rank. *Collective.*"""
    text = json.dumps(list(told)).encode()
    lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.runtime.device)
    lengths[comm.rank] = len(text)
    found = comm.sum_scalars(lengths, purpose).tolist()
    room = 8 * -(-max(found) // 8)
    table = torch.zeros(comm.size, room, dtype=torch.uint8)
    table[comm.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    words = comm.sum_scalars(table.view(torch.int64).to(comm.runtime.device), purpose)
    rows = words.cpu().view(torch.uint8).numpy()
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, found, strict=True)]


def difference(everyones: Sequence[Told]) -> str:
    """The first name of which not all ranks say the same, what they say, and how many more there are."""
    said = [dict(each) for each in everyones]
    names = dict.fromkeys(name for each in said for name in each)
    differing = [name for name in names if len({each.get(name) for each in said}) > 1]
    if not differing:
        return "they come in another order"
    sides = by_value({rank: each.get(differing[0], "not there") for rank, each in enumerate(said)})
    text = ", ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in sides.items())
    more = f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"{differing[0]} is {text}{more}"
