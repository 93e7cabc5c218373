"""Saying who waits for whom once a wait is long; the wait goes on.

[Note: A long wait] A rank that saves or evaluates alone makes the others wait, which is no fault. The first rank whose
wait has lasted `NOTICE_S` asks all ranks for their positions, through the store; each answers at its next look, and the
one that asked logs one line. Each wait is asked about once. Until a rank asks, this takes no request of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from harness.fsdp.guards.alarm import ANSWER_S, CALLED, TICK_S, RollCall
from harness.fsdp.guards.hang_report import Position

NOTICE_S = 60.0
"""Seconds that a rank waits before it asks where the others are."""


class LongWaits:
    """Questions of one model's ranks, numbered alike on all of them.

    Args:
        store: of all ranks; used by one thread.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._number = 0
        self._next_question()

    def _next_question(self) -> None:
        self._number += 1
        self._prefix = f"long wait/{self._number}"
        self._roll = RollCall(self._store, self._prefix, self._ranks)
        self._answers_until: float | None = None
        """When this rank, which has asked, looks at the answers."""

    def look(self, position: Callable[[], Position], *, asks: bool) -> bool:
        """Answer what another rank has asked, or ask if nobody has and `asks`. Returns whether this rank told its
        position."""
        if self._answers_until is not None or not (asks or self._store.check([f"{self._prefix}/asked"])):
            return False
        is_first = asks and self._store.add(f"{self._prefix}/asked", 1) == 1
        if is_first:
            self._store.set(CALLED, "1")
        self._roll.answer(self._rank, position())
        if is_first:
            self._answers_until = time.monotonic() + 2 * TICK_S + ANSWER_S
        else:
            self._next_question()
        return True

    def answers(self) -> dict[int, Position]:
        """Positions of the ranks that answered this rank's question; empty while it waits for more, or asked none."""
        if self._answers_until is None:
            return {}
        if not self._roll.is_complete() and time.monotonic() < self._answers_until:
            return {}
        found = self._roll.positions()
        self._next_question()
        return found
