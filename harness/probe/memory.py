"""Memory of this rank: what the allocator says, what the engine owns up to, what the process holds."""

from __future__ import annotations

import contextlib
import os

import psutil
import torch

from harness.probe.storage import StepBytes

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryMeter:
    """Reads once a step. On CPU the allocator is followed only over a warm-up (`storage`); else its fields are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.resident = ResidentSet()

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
        torch.cuda.reset_peak_memory_stats(self.device)
        peak = stats.get("allocated_bytes.all.peak", 0)
        return {
            "allocated": peak,
            "reserved": stats.get("reserved_bytes.all.peak", 0),
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "accounted": accounted,
            "persistent_tensor_bytes": stats.get("allocated_bytes.all.current", 0),
            "peak_tensor_bytes": peak,
            "rss": rss,
        }


class ResidentSet:
    """This process's resident set: from a file kept open on Linux (2 us a read), through psutil elsewhere (15 us)."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """Bytes now."""
        if self._descriptor < 0:
            return int(self._process.memory_info().rss)
        return int(os.pread(self._descriptor, 128, 0).split()[1]) * PAGE_BYTES

    def close(self) -> None:
        """Close the file; it can be read all the same."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
