"""Memory of this rank: what the allocator says, what the engine owns up to, what the process holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import torch

from harness.probe.storage import StepBytes

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Timed(NamedTuple):
    """Memory of this rank's device over timed steps, in bytes."""

    persistent: int
    peak: int
    """Most bytes of tensors at a time."""
    growth: int
    reserved: int
    """Most bytes the caching allocator held."""
    outside: int
    """Bytes beyond the caching allocator, and beyond what there was before this rank met others: NCCL's buffers, and
    libraries' work spaces. Of the whole device, so only where no other process uses it."""


class MemoryMeter:
    """Reads once a step. On CPU the allocator is followed only over a warm-up (`storage`); else its fields are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.resident = ResidentSet()
        self._persistent: list[int] = []
        self._peak = self._reserved = 0
        self._before = (0, 0)
        """Peaks of allocated and reserved bytes of the part of this step that `apart` broke off."""

    def begin(self) -> None:
        self._persistent, self._peak, self._reserved = [], 0, 0

    def timed(self) -> Timed | None:
        """Over the steps since `begin`; None on CPU, or where there was none."""
        if not self._persistent:
            return None
        first, last = self._persistent[0], self._persistent[-1]
        outside = outside_allocator(self.device) - _BEFORE.get(self.device, 0)
        return Timed(last, self._peak, last - first, self._reserved, max(0, outside))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out what the body holds for as long as it lasts, and give it back: the harness's own."""
        if self.on_device:
            self._before = self._peaks()
        try:
            yield
        finally:
            if self.on_device:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)

    def _peaks(self) -> tuple[int, int]:
        """Most bytes allocated and reserved in this step."""
        stats = torch.cuda.memory_stats(self.device)
        allocated, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return max(allocated, self._before[0]), max(reserved, self._before[1])

    def take(self, accounted: int, followed: StepBytes | None = None) -> dict[str, int | None]:
        """A step's `memory`, in bytes: peaks of allocated and reserved since the last call, retries since the start.

        Args:
            accounted: what the engine says it keeps between steps.
            followed: what following the CPU's allocator found for this step.
        """
        rss = self.resident.read()
        if not self.on_device:
            return {
                "allocated": None,
                "reserved": None,
                "alloc_retries": None,
                "accounted": accounted,
                "persistent_tensor_bytes": None if followed is None else followed.persistent,
                "peak_tensor_bytes": None if followed is None else followed.peak,
                "rss": rss,
            }
        stats = torch.cuda.memory_stats(self.device)
        peak, reserved = self._peaks()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = (0, 0)
        self._persistent = [*self._persistent[:1], stats.get("allocated_bytes.all.current", 0)]
        self._peak, self._reserved = max(self._peak, peak), max(self._reserved, reserved)
        return {
            "allocated": peak,
            "reserved": reserved,
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "accounted": accounted,
            "persistent_tensor_bytes": stats.get("allocated_bytes.all.current", 0),
            "peak_tensor_bytes": peak,
            "rss": rss,
        }


_BEFORE: dict[torch.device, int] = {}


def outside_allocator(device: torch.device) -> int:
    """Bytes of a CUDA device that are in use and not the caching allocator's, by whatever process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def free_bytes(device: torch.device, sharing: int) -> int:
    """Bytes that this rank may still take: of its own CUDA device; of the host, where so many ranks share it."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available) // sharing
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def note_before_meeting(device: torch.device) -> None:
    """Remember what a CUDA device holds without any communicator: CUDA's own context."""
    torch.empty(1, device=device)  # makes the context
    _BEFORE[device] = outside_allocator(device)


class ResidentSet:
    """This process's resident set: from a file kept open on Linux (2 us a read), through psutil elsewhere (15 us)."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        if self._descriptor < 0:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._descriptor, 128, 0).split()[1]) * PAGE_BYTES

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
