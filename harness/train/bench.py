"""Warm-up, then timed steps: additions of `measure=bench` to a run.

During warm-up the CPU's allocator is followed, which slows every operation; its last step is the settled state. Then
the follower and its garbage go, and the machine's load begins to count. Timed steps are ordinary steps.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from harness.control import Control
from harness.probe.storage import StepBytes
from harness.train.session import Session


class Bench:
    """Phases of one timed run. Every method but `step` is collective over all ranks."""

    def __init__(self, session: Session, control: Control) -> None:
        self.session = session
        self.control = control
        self.warmup_steps = session.config.measure.warmup_steps
        self.load_at_start = os.getloadavg()[0]
        self.began = _clocks()
        self.tensor_bytes: dict[str, Any] | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        storage = self.session.meters.storage
        if storage is None or step > self.warmup_steps:
            yield
            return
        gc.collect()  # when cycles are collected is chance; what a step leaves in them is not kept
        with storage.step():
            yield

    def after(self, step: int) -> StepBytes | None:
        """Storage of the last warm-up step on this rank, after which following stops; else None."""
        if step != self.warmup_steps:
            return None
        storage = self.session.meters.storage
        steps = [] if storage is None else storage.finish()
        settled = None
        if steps:
            settled, growth = steps[-1], steps[-1].persistent - steps[-2].persistent
            self._gather(step, {"persistent": settled.persistent, "peak": settled.peak, "growth": growth})
        del steps
        gc.collect()  # what following left behind is not to be found in a timed step
        self.session.meters.memory.begin()
        self.began = _clocks()
        return settled

    def facts(self) -> dict[str, Any]:
        """Facts for the summary, on rank 0. Collective over all ranks."""
        wall_s, machine_s, process_s = (now - before for now, before in zip(_clocks(), self.began, strict=True))
        timed = self.session.meters.memory.timed()
        if timed is not None:
            found = timed._asdict()
            if self.session.config.cluster.ranks_per_device > 1:
                del found["outside"]  # nobody can tell whose it is
            self._gather(self.session.config.train.steps, found)
        digest = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
        rows = self.control.gather([int.from_bytes(digest, "little", signed=True), round(process_s * 1e6)])
        here = sum(microseconds for host, microseconds in rows if host == rows[0][0]) / 1e6
        return {
            "tensor_bytes": self.tensor_bytes,
            "planned": self.session.planned,
            "load": {
                "at_start": self.load_at_start,
                "at_end": os.getloadavg()[0],
                "others_cores": max(0.0, machine_s - here) / wall_s,
                "timed_s": wall_s,
            },
        }

    def _gather(self, step: int, found: Mapping[str, int]) -> None:
        """Keep numbers of every rank. Collective over all ranks."""
        columns = zip(*self.control.gather([*found.values()]), strict=True)
        self.tensor_bytes = {"step": step, **{name: [*each] for name, each in zip(found, columns, strict=True)}}


OTHERS = ("user", "nice", "system", "irq", "softirq", "steal")
"""Busy fields of the system's processor times; stolen time is another machine's work on these cores."""


def _clocks() -> tuple[float, float, float]:
    """Seconds of the wall, of the machine's busy processors, and of this process."""
    times = psutil.cpu_times()
    machine = sum(getattr(times, field, 0.0) for field in OTHERS)
    return time.perf_counter(), machine, time.process_time()
