"""Steps that the checks of every step look at, chosen by what looking costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

FIRST = 8
"""Steps of an attempt that are all looked at; the cadence is chosen anew after so many, and whenever they double."""

ALLOWED_S = 1.0
"""Seconds of looking that a run may spend beyond its share: short runs are looked at in every step."""


class Cadence:
    """Steps of an attempt to look at: all, or two neighbours in every 4, 8, 16, ... of them.

    Two runs so have steps in common, and weights between two steps are looked at as well. Times are those of the
    process on CPUs, which a busy machine does not change. Args: share: of training time, spent on looking at most.
    done: steps of earlier attempts. always: steps to look at whatever they cost. agreed: the first rank's number on all
    ranks; collective over them.
    """

    def __init__(
        self, share: float, done: int, always: Collection[int], agreed: Callable[[int], int], *, on_device: bool
    ) -> None:
        self.every = self.least = 1
        self.steps, self.looking_s = 0, 0.0
        self._share, self._done, self._always, self._agreed = share, done, always, agreed
        self._now = time.perf_counter if on_device else time.process_time
        self._began, self._apart_s = self._now(), 0.0

    def looks(self, step: int) -> bool:
        return step - self._done <= FIRST or step % self.every < 2 or step in self._always

    @contextmanager
    def looking(self) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self.looking_s += self._now() - began

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Count the body neither as looking nor as training."""
        began = self._now()
        try:
            yield
        finally:
            self._apart_s += self._now() - began

    def end(self, step: int) -> None:
        """Choose the cadence for as many steps as were done, in some steps. Collective over all ranks."""
        count = step - self._done
        self.steps += self.looks(step)
        if count >= FIRST and count & (count - 1) == 0:
            self.every = self._agreed(self._chosen(count))

    def thin(self) -> None:
        """Look half as often, for good."""
        self.every = self.least = max(4, 2 * self.every)

    def _chosen(self, count: int) -> int:
        training_s = self._now() - self._began - self.looking_s - self._apart_s
        allowed_s = ALLOWED_S if self._share else 0.0
        left_s = allowed_s + 2 * self._share * training_s - self.looking_s
        affordable = max(0.0, left_s) / max(self.looking_s / self.steps, 1e-9)
        every = self.least
        while min(1.0, 2 / every) * count > affordable and every < count:
            every *= 2 if every > 1 else 4
        return every
