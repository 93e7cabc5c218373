"""Meters of one rank, made before the engine and the same for every engine: memory, times and traffic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import psutil
import torch
from torch.profiler import record_function

from harness.private_torch import is_profiled
from harness.probe.collectives import CollectiveMeter
from harness.probe.storage import StepBytes, StorageMeter


class Meters:
    def __init__(self, device: torch.device, *, follow_storage: bool = False) -> None:
        self.storage = StorageMeter() if follow_storage and device.type == "cpu" else None
        self.timers = Timers(device)
        self.collectives = CollectiveMeter()
        self.memory = MemoryMeter(device)

    def paused(self) -> AbstractContextManager[None]:
        return self.collectives.paused()

    def close(self) -> None:
        self.collectives.close()
        if self.storage is not None:
            self.storage.close()

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Timed(NamedTuple):
    """Device memory of this rank over timed steps, in bytes."""

    persistent: int
    """Bytes of tensors after the last step."""
    peak: int
    growth: int
    reserved: int
    outside: int
    """Bytes outside the caching allocator, minus those before the process groups: NCCL's buffers, and libraries' work
    spaces.

    Of the entire device, so only where no other process uses it.
    """


class MemoryMeter:
    """Reads once a step. On CPU the allocator is followed only over a warm-up (`storage`); else its fields are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self._process = psutil.Process()
        self._before = (0, 0)
        self.begin()

    def begin(self) -> None:
        self._persistent: list[int] = []
        self._peak = self._reserved = 0

    def timed(self) -> Timed | None:
        """Totals since `begin`; None on CPU, or without steps."""
        if not self._persistent:
            return None
        first, last = self._persistent[0], self._persistent[-1]
        outside = outside_allocator(self.device) - _BEFORE.get(self.device, 0)
        return Timed(last, self._peak, last - first, self._reserved, max(0, outside))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude memory that the body holds temporarily, and free it: the harness's own."""
        if self.on_device:
            self._before = self._peaks()
        try:
            yield
        finally:
            if self.on_device:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)

    def _peaks(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self.device)
        allocated, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return max(allocated, self._before[0]), max(reserved, self._before[1])

    def take(self, accounted: int, followed: StepBytes | None = None) -> dict[str, int | None]:
        """`memory` of a step, in bytes: peaks of allocated and reserved since the last call, retries since the start.

        Args: accounted: the engine's own account between steps. followed: storage by the followed CPU allocator.
        """
        peak = reserved = retries = persistent = tensors = None
        if self.on_device:
            stats = torch.cuda.memory_stats(self.device)
            peak, reserved = self._peaks()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = (0, 0)
            retries, tensors = stats.get("num_alloc_retries", 0), peak
            persistent = stats.get("allocated_bytes.all.current", 0)
            self._persistent = [*self._persistent[:1], persistent]
            self._peak, self._reserved = max(self._peak, peak), max(self._reserved, reserved)
        elif followed is not None:
            persistent, tensors = followed.persistent, followed.peak
        return {
            "allocated": peak,
            "reserved": reserved,
            "alloc_retries": retries,
            "accounted": accounted,
            "persistent_tensor_bytes": persistent,
            "peak_tensor_bytes": tensors,
            "rss": int(self._process.memory_info().rss),
        }


_BEFORE: dict[torch.device, int] = {}


def outside_allocator(device: torch.device) -> int:
    """Used bytes of a CUDA device outside the caching allocator, of any process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def free_bytes(device: torch.device, sharing: int) -> int:
    """Bytes available to this rank: of its CUDA device, or of a host shared by `sharing` ranks."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available) // sharing
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def note_before_rendezvous(device: torch.device) -> None:
    torch.empty(1, device=device)  # makes the context
    _BEFORE[device] = outside_allocator(device)


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
        self._ended: list[tuple[str, Elapsed, int]] = []
        self._open: list[str] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body; spans of one name add up. A raising body counts too, one inside `aside` does not."""
        if ASIDE in self._open:
            yield
            return
        self._open.append(name)
        end = self._begin()
        try:
            with record_function(f"harness::{name}") if is_profiled() else nullcontext():
                yield
        finally:
            elapsed = end()
            self._open.pop()
            self._ended.append((name, elapsed, 1))
            if name == ASIDE:
                self._ended += [(around, elapsed, -1) for around in self._open]

    def aside(self) -> AbstractContextManager[None]:
        """Exclude the body from every span around it: the harness's own work within a step."""
        return self.span(ASIDE)

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
        for name, elapsed, sign in self._ended:
            taken[name] = taken.get(name, 0.0) + sign * elapsed()
        self._ended = []
        return taken
