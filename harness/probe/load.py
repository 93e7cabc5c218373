"""Load of the machine by other programs during a timing."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import psutil

OTHERS = ("user", "nice", "system", "irq", "softirq", "steal")
"""Busy fields of the system's processor times; stolen time is another machine's work on these cores."""


class Reading(NamedTuple):
    wall_s: float
    machine_s: float
    process_s: float


class LoadMeter:
    def __init__(self) -> None:
        self.load_at_start = load_average()
        self._began: Reading | None = None

    def begin(self) -> None:
        self._began = _read()

    def take(self) -> Reading:
        """Times since `begin`. Raises `RuntimeError`: it was not called."""
        if self._began is None:
            raise RuntimeError("LoadMeter.begin was not called")
        now = _read()
        return Reading(*(after - before for after, before in zip(now, self._began, strict=True)))


def load_average() -> float:
    return os.getloadavg()[0]


def _read() -> Reading:
    times = psutil.cpu_times()
    machine = sum(getattr(times, field, 0.0) for field in OTHERS)
    return Reading(time.perf_counter(), machine, time.process_time())
