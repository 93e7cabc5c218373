"""How ranks that no collective joins any more agree on one message: through the store of their process group.

One process keeps the store for perhaps thousands of ranks: so none asks again and again, each waits for a key that the
last of them sets.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

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

_ALARM, _VERDICT = "alarm", "verdict"
_ANSWERED, _ALL_ANSWERED, _READERS, _ALL_READ = "answered", "all answered", "readers", "all read"


@dataclass
class _Verdict:
    """What all ranks raise, and how many of them answered."""

    message: str
    answered: int = 0


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

    def is_raised(self) -> bool:
        """Whether some rank has raised it."""
        raised: bool = self.ear.check([_ALARM])
        return raised

    def agree(self, position: Position) -> str:
        """Raise it and tell this rank's position; returns the message that all ranks which answer return."""
        store = self._voice
        store.set(_place(self._rank), json.dumps(asdict(position)))
        store.set(_ALARM, "1")
        place = store.add(_ANSWERED, 1)
        if place == len(self._ranks):
            store.set(_ALL_ANSWERED, "1")
        if place == 1:
            positions = self._collect()
            message = tell(positions, self._ranks, self._timeout_s)
            store.set(_VERDICT, json.dumps(asdict(_Verdict(message, len(positions)))))
        store.wait([_VERDICT], timedelta(seconds=2 * self._tick_s + ANSWER_S + 2.0))
        verdict = _Verdict(**json.loads(store.get(_VERDICT)))
        if store.add(_READERS, 1) >= verdict.answered:
            store.set(_ALL_READ, "1")
        with suppress(RuntimeError):  # some did not read it in time
            store.wait([_ALL_READ], timedelta(seconds=READ_S))
        return verdict.message

    def _collect(self) -> dict[int, Position]:
        """Positions of the ranks that answer in time."""
        with suppress(RuntimeError):  # some do not
            self._voice.wait([_ALL_ANSWERED], timedelta(seconds=2 * TICK_S + ANSWER_S))
        answered = [rank for rank in self._ranks if self._voice.check([_place(rank)])]
        return {rank: Position(**json.loads(self._voice.get(_place(rank)))) for rank in answered}


def _place(rank: int) -> str:
    return f"position/{rank}"
