"""Many programs on the same ranks, one after the other: none may hold up or spoil those after it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fsdp.ordinary.running import RANKS, Lost, Outcome, Raised
from tests.support.forking import fork_ranks

PATIENCE = 20
"""Seconds in a collective, unless told otherwise."""
GRACE = 5
"""Seconds a rank that failed leaves the others to come to the same end by themselves."""
LIMIT = 60
"""Seconds a program may take; then its ranks are ended, and it hangs."""


def run(attempt: Callable[[int, Any], Outcome], todo: Sequence[Any], patience: int = PATIENCE) -> list[list[Outcome]]:
    """Outcomes of `attempt(rank, each)` by program and rank; each has a process group of its own.

    After a program that raises, ends its ranks or takes longer than `LIMIT`, new ranks run the others.
    """
    found: list[list[Outcome]] = []
    while len(found) < len(todo):
        found += _visit(attempt, todo[len(found) :], patience)
    return found


def _visit(attempt: Callable[[int, Any], Outcome], todo: Sequence[Any], patience: int) -> list[list[Outcome]]:
    """As far as one set of ranks comes: at least one program."""
    with tempfile.TemporaryDirectory() as folder:
        codes = fork_ranks(_rank, RANKS, folder, attempt, list(todo), patience, first_failure_ends_all=True)
        found: list[list[Outcome]] = []
        for number in range(len(todo)):
            found.append([_answer(_place(folder, number, rank), codes[rank]) for rank in range(RANKS)])
            if any(isinstance(outcome, Lost) or _has_failed(outcome) for outcome in found[-1]):
                break
    return found


def _place(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"{number}-{rank}.pkl"


def _answer(path: Path, code: int) -> Outcome:
    if not path.exists():
        return Lost("hung" if code in (0, 1, -9) else f"ended by signal {-code}")
    answer: Outcome = pickle.loads(path.read_bytes())
    return answer


def _rank(rank: int, folder: str, attempt: Callable[[int, Any], Outcome], todo: list[Any], patience: int) -> None:
    """All programs; at the end, or where one takes too long, the process ends at once: threads may wait for ever."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a rank says whose partner is gone is no news
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    for number, each in enumerate(todo):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        store_here = dist.PrefixStore(str(number), store)
        dist.init_process_group(
            "gloo", store=store_here, rank=rank, world_size=RANKS, timeout=timedelta(seconds=patience)
        )
        outcome = attempt(rank, each)
        _leave(store_here, rank, failed=_has_failed(outcome))
        part = _place(folder, number, rank).with_suffix(".part")
        part.write_bytes(pickle.dumps(outcome))
        part.rename(part.with_suffix(".pkl"))
        if _has_failed(outcome):  # what a program leaves that broke off is nobody's to clean up
            break
    os._exit(0)


def _has_failed(outcome: Any) -> bool:
    """Whether an outcome, or the first of several things that came with it, is an error."""
    return isinstance(outcome[0] if isinstance(outcome, tuple) else outcome, Raised)


def _leave(store: dist.Store, rank: int, *, failed: bool) -> None:
    """End the process group when all ranks are through; where this one failed, others may wait for it in vain."""
    _meet(store, rank, "through", GRACE if failed else LIMIT)
    dist.destroy_process_group()
    _meet(store, rank, "out", LIMIT)


def _meet(store: dist.Store, rank: int, where: str, seconds: float) -> None:
    """Wait for the other ranks without the process group."""
    store.set(f"{rank} is {where}", "")
    with suppress(Exception):
        store.wait([f"{each} is {where}" for each in range(RANKS)], timedelta(seconds=seconds))
