"""Meters of one rank, made before the engine and the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.probe.collectives import CollectiveMeter
from harness.probe.memory import MemoryMeter
from harness.probe.storage import StorageMeter
from harness.probe.timers import Timers


class Meters:
    def __init__(self, device: torch.device, *, follow_storage: bool = False) -> None:
        self.storage = StorageMeter() if follow_storage and device.type == "cpu" else None
        self.timers = Timers(device)
        self.collectives = CollectiveMeter()
        self.memory = MemoryMeter(device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.collectives.paused():
            yield

    def close(self) -> None:
        self.collectives.close()
        self.memory.resident.close()
        if self.storage is not None:
            self.storage.close()

    def __enter__(self) -> Meters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
