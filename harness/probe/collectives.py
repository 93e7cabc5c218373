"""Traffic and waits of this process as engines announce them, for every engine alike.

A collective that an engine builds of several operations is announced through `harness.fsdp.Observer`: its
operations' bytes then belong to the announced kind and bucket, and it counts once. What a peer reads from this
process's memory passes no operation; the engine announces it too, by the tensors it lays out, and it counts as sent.
So are the host's waits announced, whose sum is exposed communication: on CPU, as on CUDA the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from harness.fsdp import Observer
from harness.probe.traffic import UNLABELLED, Row as Row, Traffic, by_kind as by_kind


class CollectiveMeter(Traffic, Observer):
    """Counts from its construction to `close`. One is active at a time."""

    yields = False

    def __init__(self) -> None:
        """Raises `RuntimeError`: another meter is active."""
        super().__init__()
        self._waited_s: float | None = None
        self.attach()

    def close(self) -> None:
        super().close()
        self.detach()

    def counted(self, kind: str, num_bytes: int) -> None:
        label = Observer.current()
        if label is None:
            super().counted(kind, num_bytes)
        elif label.is_traffic:
            self.add(label.kind, label.bucket, 0, num_bytes)

    def functional(self, kind: str) -> str | None:
        label = Observer.current()
        return super().functional(kind) if label is None or label.is_traffic else None

    def functional_wait(self) -> AbstractContextManager[Any]:
        return Observer.waiting()

    def begin(self, label: tuple[str, str], data: Sequence[Any]) -> None:
        self.add(*label, 1, 0)

    def sent(self, kind: str, bucket: str, num_bytes: int) -> None:
        """Count bytes without an operation."""
        self.add(kind, bucket, int(bucket == UNLABELLED), num_bytes)

    def waited(self, seconds: float) -> None:
        if not self._paused:
            self._waited_s = (self._waited_s or 0.0) + seconds

    def take_waited_s(self) -> float | None:
        """Seconds of announced waits since the last call; None without any."""
        taken, self._waited_s = self._waited_s, None
        return taken
