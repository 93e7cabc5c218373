"""Which accesses nothing orders: happens-before by vector clocks over streams and the host.

A stream runs its own work in order. It knows of another stream what it has waited for, directly or through a third; the
host knows of a stream what it has stopped for, and whatever it issues later comes after that. An access that a stream
does not know of yet may run before, beside or after its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.streams.log import HOST, Allocate, Entry, Free, Keep, Kernel, Log, Mark, Site, Span, Stop, Wait

Clock = dict[str, int]


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, of which at least one writes, that may run in any order.

    buffer: whose bytes. first, then: what the host issued first and afterwards. on, behind: the stream that should have
    waited, and for which.
    """

    buffer: str
    first: str
    then: str
    on: str
    behind: str
    sites: tuple[Site, Site]

    def __str__(self) -> str:
        return (
            f"{self.buffer}: nothing orders {self.first} before {self.then}. Missing: stream {self.on} waits for an"
            f" event on {self.behind} recorded after the former"
        )


@dataclass(slots=True)
class Access:
    """The last access of one kind by one stream to some bytes."""

    stream: str
    number: int
    writes: bool
    span: Span
    what: str
    site: Site


@dataclass(slots=True)
class Block:
    """stream, pool: where its memory comes from."""

    stream: str = ""
    pool: int = 0
    accesses: dict[tuple[str, bool, int, int], Access] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


class Analysis:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.found: dict[tuple[Site, Site, str], Race] = {}
        self._clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, Block] = {}
        self._freed: dict[tuple[str, int], list[Block]] = {}

    def run(self, left_out: Callable[[Entry], bool] = lambda entry: False) -> list[Race]:
        """All races; those of the same two lines over the same buffer once."""
        steps: dict[type, Callable[..., None]] = {
            Kernel: self._kernel,
            Mark: self._mark,
            Wait: self._wait,
            Stop: self._stop,
            Allocate: self._allocate,
            Free: self._free,
            Keep: self._keep,
        }
        for entry in self.log.entries:
            step = steps.get(type(entry))
            if step is not None and not left_out(entry):
                step(entry)
        return list(self.found.values())

    def _clock(self, stream: str) -> Clock:
        """A stream's knowledge; what the host issues now comes after all that the host knows."""
        clock = self._clocks.setdefault(stream, {stream: 0})
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _mark(self, mark: Mark) -> None:
        self._events[mark.event] = dict(self._clock(mark.stream))

    def _wait(self, wait: Wait) -> None:
        if wait.event in self._events:
            _join(self._clock(wait.stream), self._events[wait.event])

    def _stop(self, stop: Stop) -> None:
        for stream in [stop.stream] if stop.stream else list(self._clocks):
            _join(self._clocks[HOST], self._clock(stream))

    def _kernel(self, kernel: Kernel) -> None:
        clock = self._clock(kernel.stream)
        clock[kernel.stream] += 1
        number = clock[kernel.stream]
        for writes, spans in ((False, kernel.reads), (True, kernel.writes)):
            for span in spans:
                access = Access(kernel.stream, number, writes, span, "", kernel.site)
                self._check(access, clock, str(kernel))
                access.what = str(kernel)
                held = self._blocks.setdefault(span.block, Block()).accesses
                held[kernel.stream, writes, span.begin, span.end] = access

    def _check(self, new: Access, clock: Clock, what: str) -> None:
        block = self._blocks.get(new.span.block)
        for old in block.accesses.values() if block is not None else ():
            if _conflict(old, new) and clock.get(old.stream, 0) < old.number:
                self._report(self.log.name_of(new.span), old, what, new.stream, new.site)

    def _report(self, buffer: str, old: Access, what: str, on: str, site: Site) -> None:
        key = old.site, site, buffer
        if key not in self.found:
            self.found[key] = Race(buffer, old.what, what, on, old.stream, (old.site, site))

    def _allocate(self, made: Allocate) -> None:
        clock = self._clock(made.stream)
        for block in self._freed.pop((made.stream, made.pool), []):
            for old in block.accesses.values():
                if old.stream not in block.kept and clock.get(old.stream, 0) < old.number:
                    what = f"the next use of its memory, allocated from stream {made.stream} at {made.site.place}"
                    self._report(self.log.name_of(old.span), old, what, made.stream, made.site)
        whole = Span(made.block, 0, made.num_bytes)
        what = f"what its memory was used for before it was allocated on stream {made.stream} at {made.site.place}"
        before = Access(made.stream, clock[made.stream], True, whole, what, made.site)
        self._blocks[made.block] = Block(made.stream, made.pool, {(made.stream, True, -1, -1): before})

    def _free(self, freed: Free) -> None:
        block = self._blocks.pop(freed.block, None)
        if block is not None and block.stream:
            self._freed.setdefault((block.stream, block.pool), []).append(block)

    def _keep(self, keep: Keep) -> None:
        if keep.block in self._blocks:
            self._blocks[keep.block].kept.append(keep.stream)


def _conflict(old: Access, new: Access) -> bool:
    """Whether the order of two accesses to a block matters, and does not follow from their stream's."""
    if old.stream == new.stream or not (old.writes or new.writes):
        return False
    return old.span.begin < new.span.end and new.span.begin < old.span.end


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def races_of(log: Log, left_out: Callable[[Entry], bool] = lambda entry: False) -> list[Race]:
    """Races of a log, as if the entries that are `left_out` were not in it."""
    return Analysis(log).run(left_out)
