"""What the engine uses of `torch.cuda`, recorded: streams, events, pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.streams.log import Entry, Mark, Site, Stop, Wait

MAIN = "main"
"""The stream a program begins on."""


class Stream:
    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.cuda)
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event, why: str = "event") -> None:
        """What is issued here from now on runs after the event; one that was never recorded is no event."""
        if event.number is not None:
            self.cuda.put(Wait(self.name, event.number, self.cuda.site(), why))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.put(Stop(self.name, self.cuda.site(), "synchronize"))


class Event:
    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda = cuda
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.number = next(self.cuda.numbers)
        self.cuda.put(Mark(self.number, (stream or self.cuda.current).name, self.cuda.site()))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.cuda.current).wait_event(self)

    def query(self) -> bool:
        """Work is done at once here."""
        return True


class Pool:
    def __init__(self, number: int) -> None:
        self.number = number


class RecordedCuda:
    """Stands for the module `torch.cuda`, as far as the engine uses it.

    Args:
        put: takes what is to be written down.
        site: tells which line asks.
    """

    def __init__(self, put: Callable[[Entry], None], site: Callable[[], Site]) -> None:
        self.put = put
        self.site = site
        self.numbers = count()
        self.current = Stream(self, MAIN)
        self.pool = 0
        self._names = count()
        self._pools = count(1)

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, f"side {next(self._names)}")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        self.put(Stop("", self.site(), "synchronize"))

    def MemPool(self, allocator: Any) -> Pool:
        """A pool over an allocator, which must be a group's."""
        if allocator is not ALLOCATOR:
            raise TypeError(f"MemPool takes the allocator of a process group's backend, not {allocator!r}")
        return Pool(next(self._pools))

    @contextmanager
    def use_mem_pool(self, pool: Pool, device: Any = None) -> Iterator[None]:
        before, self.pool = self.pool, pool.number
        try:
            yield
        finally:
            self.pool = before


ALLOCATOR = object()
"""Stands for the allocator of NCCL."""
