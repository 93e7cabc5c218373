"""Exposed communication: how long the host stood still for collectives, where the engine announces it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.fsdp.comm import events


class WaitMeter:
    """Adds up the waits an engine announces through `harness.fsdp.comm.events`, until `close`.

    Observed on CPU only: on CUDA the host runs ahead, and what the device waits for is not what the host waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds: float | None = None
        self._paused = False
        self._end = events.on_wait(self._add) if device.type == "cpu" else lambda: None

    def take(self) -> float | None:
        """Seconds since the last call; None where no wait was announced."""
        taken, self._seconds = self._seconds, None
        return taken

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._end()
        self._end = lambda: None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the waits of the body."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _add(self, seconds: float) -> None:
        if not self._paused:
            self._seconds = (self._seconds or 0.0) + seconds
