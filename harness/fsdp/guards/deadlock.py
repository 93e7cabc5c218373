"""Ranks that wait for each other: found long before a wait has lasted too long, as none of them can go on.

[Note: Mutual waits] A rank whose own thread has waited for some seconds tells in the store what its waits are for, and
which collectives it has begun, each so many times. One rank reads this of all. Where each rank has told, and each of
its waits is for a collective that another of them has not begun so many times, nobody can begin it any more: the one
that should waits, too. So it is when a rank leaves out a backward that others run, or a forward. Nothing is told or
read while all is well, and a slow exchange is none: its ranks have all begun it. What a rank has told may be old (it
was stopped, or its threads did not come to run), and is right all the same: counts only grow, and of ranks that all
waited in vain none could be the first to go on. For this a rank tells waits and counts of one moment. Where groups have
fewer ranks than the model, or a process has or had several models, counts differ without a fault, and only the limit
counts: a rank that knows other models tells nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SUSPECT_S = 5.0
"""Seconds that a rank waits before it tells what for."""


@dataclass(frozen=True)
class Stand:
    """Where a rank stands that waits.

    waits: of each wait, the names of collectives it is for. begun: how many of each name this rank has begun.
    """

    waits: list[list[str]]
    begun: dict[str, int]


class Stands:
    """What the ranks of one model tell of their waits.

    Args:
        store: of all its ranks.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._told = ""
        self._stuck: dict[int, str] = {}

    def tell(self, stand: Stand | None) -> None:
        """Tell where this rank stands; None: it goes on."""
        text = "" if stand is None else json.dumps(asdict(stand))
        if text != self._told:
            self._store.set(_place(self._rank), text)
            self._told = text

    def is_deadlock(self) -> bool:
        """Whether all ranks wait for each other, as they did when this was asked last. The first rank answers."""
        texts = self._read() if self._told and self._rank == self._ranks[0] else {}
        stuck = texts if texts and all_stuck({rank: Stand(**json.loads(text)) for rank, text in texts.items()}) else {}
        lasts, self._stuck = bool(stuck) and stuck == self._stuck, stuck
        return lasts

    def _read(self) -> dict[int, str]:
        """What all ranks have told; nothing where one goes on."""
        places = [_place(rank) for rank in self._ranks]
        if not self._store.check(places):
            return {}
        texts = {rank: self._store.get(_place(rank)).decode() for rank in self._ranks}
        return texts if all(texts.values()) else {}


def all_stuck(stands: Mapping[int, Stand]) -> bool:
    """Whether each wait of each rank is for what another rank has not begun."""
    return all(
        stand.waits and all(_is_vain(rank, names, stands) for names in stand.waits) for rank, stand in stands.items()
    )


def _is_vain(rank: int, names: Sequence[str], stands: Mapping[int, Stand]) -> bool:
    wanted = {name: stands[rank].begun.get(name, 0) for name in names}
    others = [stand for other, stand in stands.items() if other != rank]
    return any(count > each.begun.get(name, 0) for name, count in wanted.items() for each in others)


def _place(rank: int) -> str:
    return f"stand/{rank}"
