"""How ranks that no collective joins any more agree on one message: through the store of their process group."""

from __future__ import annotations

import json
import time
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

_ALARM, _COMPOSER, _VERDICT, _READERS = "alarm", "composer", "verdict", "readers"


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
        if store.add(_COMPOSER, 1) == 1:
            positions = self._collect()
            message = tell(positions, self._ranks, self._timeout_s)
            store.set(_VERDICT, json.dumps(asdict(_Verdict(message, len(positions)))))
        store.wait([_VERDICT], timedelta(seconds=2 * self._tick_s + ANSWER_S + 2.0))
        verdict = _Verdict(**json.loads(store.get(_VERDICT)))
        readers = store.add(_READERS, 1)
        deadline = time.monotonic() + READ_S
        while readers < verdict.answered and time.monotonic() < deadline:
            time.sleep(0.02)
            readers = store.add(_READERS, 0)
        return verdict.message

    def _collect(self) -> dict[int, Position]:
        """Positions of the ranks that answer in time."""
        found: dict[int, Position] = {}
        deadline = time.monotonic() + 2 * TICK_S + ANSWER_S
        while True:
            for rank in self._ranks:
                if rank not in found and self._voice.check([_place(rank)]):
                    found[rank] = Position(**json.loads(self._voice.get(_place(rank))))
            if len(found) == len(self._ranks) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)


def _place(rank: int) -> str:
    return f"position/{rank}"
