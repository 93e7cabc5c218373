"""Exposed communication: host waits for collectives, where the engine announces them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.fsdp import Observer


class WaitMeter(Observer):
    """Sum of announced waits, until `close`.

    Only on CPU: on CUDA the host runs ahead, and its waits are not the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds: float | None = None
        self._paused = False
        if device.type == "cpu":
            self.attach()

    def take(self) -> float | None:
        """Seconds since the last call; None without waits."""
        taken, self._seconds = self._seconds, None
        return taken

    def close(self) -> None:
        self.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def waited(self, seconds: float) -> None:
        if not self._paused:
            self._seconds = (self._seconds or 0.0) + seconds
