"""Memory of this rank: what the allocator says, what the engine owns up to, what the process holds."""

from __future__ import annotations

import psutil
import torch


class MemoryMeter:
    """Reads once a step. On CPU there is no allocator to ask and those fields are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.process = psutil.Process()

    def take(self, accounted: int) -> dict[str, int | None]:
        """A step's `memory`, in bytes: peaks of allocated and reserved since the last call, retries since the start."""
        rss = self.process.memory_info().rss
        if not self.on_device:
            return {"allocated": None, "reserved": None, "alloc_retries": None, "accounted": accounted, "rss": rss}
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return {
            "allocated": stats.get("allocated_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.peak", 0),
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "accounted": accounted,
            "rss": rss,
        }
