"""Many cases on the same ranks, one after the other: none may hold up or spoil those after it."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forking import fork_ranks

GRACE = 5
"""Seconds a rank that broke off leaves the others to come to the same end by themselves."""


@dataclass(frozen=True)
class Lost:
    """The rank gave no answer: it hung, or its process ended."""

    why: str


@dataclass(frozen=True)
class Visit:
    """How cases are run.

    attempt: called with the rank and a case. broke_off: of an answer, whether that rank left the case in the middle, so
    that others may wait for it in vain. patience: seconds in a collective. limit: seconds a case may take. goes_on: the
    same ranks run what comes after a case that broke off. tries: of a case whose ranks gave no answer. one_group: cases
    of the same ranks share a process group, as engines keep state of it.
    """

    attempt: Callable[[int, Any], Any]
    ranks: int
    broke_off: Callable[[Any], bool]
    patience: float = 20
    limit: float = 60
    goes_on: bool = False
    tries: int = 1
    one_group: bool = False

    def run(self, todo: Sequence[Any]) -> list[list[Any]]:
        """Answers by case and rank; each case has a process group of its own, unless `one_group`.

        After a case whose ranks end, or that takes longer than `limit`, new ranks run the others.
        """
        found: list[list[Any]] = []
        tried: dict[int, int] = {}
        while len(found) < len(todo):
            found += self._visit(todo[len(found) :])
            last = len(found) - 1
            if any(isinstance(answer, Lost) for answer in found[last]):
                tried[last] = tried.get(last, 0) + 1
                del found[last + (tried[last] >= self.tries) :]
        return found

    def _visit(self, todo: Sequence[Any]) -> list[list[Any]]:
        """As far as one set of ranks comes: at least one case."""
        with tempfile.TemporaryDirectory() as folder:
            codes = fork_ranks(_rank, self.ranks, folder, self, list(todo), first_failure_ends_all=True)
            found: list[list[Any]] = []
            for number in range(len(todo)):
                places = [_place(folder, number, rank) for rank in range(self.ranks)]
                found.append([_answer(place, code) for place, code in zip(places, codes, strict=True)])
                lost = any(isinstance(answer, Lost) for answer in found[-1])
                if lost or (not self.goes_on and any(map(self.broke_off, found[-1]))):
                    break
        return found


def _place(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"{number}-{rank}.pkl"


def _answer(path: Path, code: int) -> Any:
    if not path.exists():
        return Lost("hung" if code in (0, 1, -9) else f"ended by signal {-code}")
    return pickle.loads(path.read_bytes())


def _rank(rank: int, folder: str, visit: Visit, todo: list[Any]) -> None:
    """All cases; at the end, or where one takes too long, the process ends at once: threads may wait for ever."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a rank says whose partner is gone is no news
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", visit.ranks)
    timeout = timedelta(seconds=visit.patience)
    for number, case in enumerate(todo):
        faulthandler.dump_traceback_later(visit.limit, exit=True)
        here = dist.PrefixStore(str(number), store)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=here, rank=rank, world_size=visit.ranks, timeout=timeout)
        answer = visit.attempt(rank, case)
        broke_off = visit.broke_off(answer)
        _meet(here, rank, visit, "through", (0 if visit.goes_on else GRACE) if broke_off else visit.limit)
        if not visit.one_group:
            dist.destroy_process_group()
        _meet(here, rank, visit, "out", 0 if visit.one_group and broke_off else visit.limit)
        part = _place(folder, number, rank).with_suffix(".part")
        part.write_bytes(pickle.dumps(answer))
        part.rename(part.with_suffix(".pkl"))
        if broke_off and not visit.goes_on:  # what a case leaves that broke off is nobody's to clean up
            break
    os._exit(0)


def _meet(store: dist.Store, rank: int, visit: Visit, where: str, seconds: float) -> None:
    """Wait for the other ranks without the process group; those that do not come are left."""
    store.set(f"{rank} is {where}", "")
    if seconds:
        with suppress(Exception):
            store.wait([f"{each} is {where}" for each in range(visit.ranks)], timedelta(seconds=seconds))
