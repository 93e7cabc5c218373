"""Memory of this rank: of the allocator, the engine's account, and the process."""

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
        self.resident = ResidentSet()
        self._persistent: list[int] = []
        self._peak = self._reserved = 0
        self._before = (0, 0)

    def begin(self) -> None:
        self._persistent, self._peak, self._reserved = [], 0, 0

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


class ResidentSet:
    """Resident set of this process: from an open file on Linux (2 us a read), through psutil elsewhere (15 us)."""

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
