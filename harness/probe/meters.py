"""The meters of one rank, made before the engine and the same for every engine."""

from __future__ import annotations

import torch

from harness.probe.collectives import CollectiveMeter
from harness.probe.memory import MemoryMeter
from harness.probe.timers import Timers


class Meters:
    """Time, traffic and memory. Close them when the run is over."""

    def __init__(self, device: torch.device) -> None:
        self.timers = Timers(device)
        self.collectives = CollectiveMeter()
        self.memory = MemoryMeter(device)

    def close(self) -> None:
        """Stop counting collectives."""
        self.collectives.close()

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
