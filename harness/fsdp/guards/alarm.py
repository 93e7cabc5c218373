"""How ranks that no collective joins any more agree on one message: through the store of their process group.

One process keeps the store for perhaps thousands of ranks: so none asks again and again, each waits for a key that the
last of them sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from harness.fsdp.guards.hang_report import Position, tell
from harness.fsdp.guards.shared_store import stores_of

TICK_S = 0.5
"""Seconds between two looks, at most; a quarter of the limit where that is less."""
ANSWER_S = 2.0
"""Seconds that other ranks are given to tell where they are, beyond two looks."""
READ_S = 2.0
"""Seconds that other ranks are given to read the verdict before this one fails and perhaps ends."""
PATIENCE_S = 10.0
"""Seconds that all of it may take: more than two looks, the answers, the verdict and its readers do together."""

CALLED = "called"
"""Key that is set once any rank has asked for positions: until then a rank looks for this one alone."""
_ALARM, _VERDICT = "alarm", "verdict"
_READERS, _ALL_READ = "readers", "all read"


@dataclass
class _Verdict:
    """What all ranks raise, and how many of them answered."""

    message: str
    answered: int = 0


class RollCall:
    """Every rank tells its position once, under a prefix of the store."""

    def __init__(self, store: Any, prefix: str, ranks: Sequence[int]) -> None:
        self._store, self._prefix, self._ranks = store, prefix, ranks
        self._all_answered = f"{prefix}/all answered"

    def answer(self, rank: int, position: Position) -> bool:
        """Tell a rank's position; returns whether it is the first to answer."""
        self._store.set(self._place(rank), json.dumps(asdict(position)))
        place = self._store.add(f"{self._prefix}/answered", 1)
        if place == len(self._ranks):
            self._store.set(self._all_answered, "1")
        return bool(place == 1)

    def is_complete(self) -> bool:
        """Whether all ranks have answered."""
        return bool(self._store.check([self._all_answered]))

    def wait(self, limit_s: float) -> None:
        """Wait until all ranks have answered, or for so long."""
        with suppress(RuntimeError):  # some do not
            self._store.wait([self._all_answered], timedelta(seconds=limit_s))

    def positions(self) -> dict[int, Position]:
        """Positions of the ranks that have answered."""
        everyone = self.is_complete()
        ranks = [rank for rank in self._ranks if everyone or self._store.check([self._place(rank)])]
        found = self._store.multi_get([self._place(rank) for rank in ranks])
        return {rank: Position(**json.loads(text)) for rank, text in zip(ranks, found, strict=True)}

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


class Alarm:
    """The alarm of one model's ranks. Its calls last as long as the store is silent, which may be for ever.

    Args:
        group: all ranks of the model; its store carries the alarm.
        timeout_s: seconds a wait for a collective may last, for the message.
        tick_s: seconds between two looks of a rank.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, tick_s: float) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._tick_s = tick_s
        # Two connections: who agrees does not wait for who listens.
        self.ear, self._voice = stores_of(group, timeout_s=ANSWER_S + timeout_s, clones=2)

    def is_called(self) -> bool:
        """Whether some rank has asked for positions: by this alarm or for a notice."""
        called: bool = self.ear.check([CALLED])
        return called

    def is_raised(self) -> bool:
        """Whether some rank has raised it."""
        raised: bool = self.ear.check([_ALARM])
        return raised

    def agree(self, position: Position) -> str:
        """Raise it and tell this rank's position; returns the message that all ranks which answer return."""
        store = self._voice
        roll = RollCall(store, "position", self._ranks)
        store.set(_ALARM, "1")
        if roll.answer(self._rank, position):
            store.set(CALLED, "1")
            roll.wait(2 * TICK_S + ANSWER_S)
            positions = roll.positions()
            message = tell(positions, self._ranks, self._timeout_s)
            store.set(_VERDICT, json.dumps(asdict(_Verdict(message, len(positions)))))
        store.wait([_VERDICT], timedelta(seconds=2 * self._tick_s + ANSWER_S + 2.0))
        verdict = _Verdict(**json.loads(store.get(_VERDICT)))
        if store.add(_READERS, 1) >= verdict.answered:
            store.set(_ALL_READ, "1")
        with suppress(RuntimeError):  # some did not read it in time
            store.wait([_ALL_READ], timedelta(seconds=READ_S))
        return verdict.message
