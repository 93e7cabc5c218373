"""Spans of time on the host clock, or on the device's own clock where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timers:
    """Named spans, summed over a step.

    On CUDA a span is a pair of events on the current stream, read once a step, so that measuring never makes the host
    wait in the middle of a step; on CPU it is the monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body; spans of one name add up. A body that raises counts as well."""
        if self.on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._events.append((name, begin, end))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; on CUDA the device is waited for."""
        if self._events:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        taken, self._seconds, self._events = self._seconds, {}, []
        return taken
