"""Spans of time on the host clock, or on the device's own clock where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import record_function

from harness.private_torch import is_profiled

ASIDE = "aside"

Elapsed = Callable[[], float]
"""Seconds of a finished span; on CUDA known after a synchronisation."""


class Timers:
    """Named spans, summed over a step.

    On CUDA a span is a pair of events on the current stream, read once a step, so that the host never waits within a
    step; on CPU it is the monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self._ended: list[tuple[str, Elapsed, list[Elapsed]]] = []
        self._open: list[list[Elapsed]] = []
        self._is_aside = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body; spans of one name add up. A raising body counts too, one inside `aside` does not."""
        if self._is_aside:
            yield
            return
        left_out: list[Elapsed] = []
        self._open.append(left_out)
        end = self._begin()
        try:
            with record_function(f"harness::{name}") if is_profiled() else nullcontext():
                yield
        finally:
            self._ended.append((name, end(), left_out))
            self._open.pop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the body from every span around it: the harness's own work within a step."""
        if self._is_aside:
            yield
            return
        self._is_aside, end = True, self._begin()
        try:
            yield
        finally:
            self._is_aside = False
            elapsed = end()
            self._ended.append((ASIDE, elapsed, []))
            for left_out in self._open:
                left_out.append(elapsed)

    def _begin(self) -> Callable[[], Elapsed]:
        if self.on_device:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()

            def end_on_device() -> Elapsed:
                last.record()
                return lambda: float(first.elapsed_time(last)) / 1e3

            return end_on_device
        start = time.perf_counter()

        def end() -> Elapsed:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return end

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call, without those of `aside`; `ASIDE` is always there. Synchronises CUDA."""
        if self._ended and self.on_device:
            torch.cuda.synchronize()
        taken = {ASIDE: 0.0}
        for name, elapsed, left_out in self._ended:
            taken[name] = taken.get(name, 0.0) + elapsed() - sum(each() for each in left_out)
        self._ended = []
        return taken
