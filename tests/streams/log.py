"""What a recorder writes down: operations on streams, what streams wait for, and who has which memory when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
"""The stream of what the host itself reads, writes and waits for."""


class Span(NamedTuple):
    """Bytes `begin .. end` of one block."""

    block: int
    begin: int
    end: int


class Site(NamedTuple):
    """A line of the engine, or of the program that uses it. of: the bucket or collective it is about, if that is
    known."""

    file: str
    line: int
    function: str
    of: str = ""

    @property
    def in_engine(self) -> bool:
        return self.file.startswith("harness/")

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(slots=True)
class Kernel:
    """Work on a stream.

    size: number of elements of its largest argument. moves: bytes of the whole that a collective gathers or reduces;
    twice, where it does both. group: of a collective.
    """

    name: str
    stream: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    site: Site
    size: int = 0
    moves: int = 0
    group: str = ""

    def __str__(self) -> str:
        of = f" of {self.site.of}" if self.site.of else ""
        return f"{self.name}{of} on stream {self.stream} at {self.site.place}"


@dataclass(slots=True)
class Mark:
    """An event is recorded at the end of a stream."""

    event: int
    stream: str
    site: Site


@dataclass(slots=True)
class Wait:
    """A stream waits for an event. why: "event", "work" (a collective's end), or "issue": a collective waits for what
    the stream it is issued on holds, and "autograd": what torch itself orders."""

    stream: str
    event: int
    site: Site
    why: str = "event"


@dataclass(slots=True)
class Stop:
    """The host waits for everything on a stream; for all streams if that is empty."""

    stream: str
    site: Site
    why: str


@dataclass(slots=True)
class Allocate:
    """A block of memory from the pool of a stream."""

    block: int
    stream: str
    num_bytes: int
    pool: int
    site: Site


@dataclass(slots=True)
class Free:
    """A block goes back to where it came from."""

    block: int
    site: Site


@dataclass(slots=True)
class Keep:
    """`record_stream`: a block is not handed out again before what this stream now holds is done."""

    block: int
    stream: str
    site: Site


@dataclass(slots=True)
class Phase:
    """What begins in the program: forward, backward, step."""

    name: str


Entry = Kernel | Mark | Wait | Stop | Allocate | Free | Keep | Phase


@dataclass
class Log:
    """names: what a block is, where that is known: its owner by range of bytes."""

    entries: list[Entry] = field(default_factory=list)
    names: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    hosts: set[int] = field(default_factory=set)
    """Blocks in the host's memory."""

    def name_of(self, span: Span) -> str:
        """Names of what lies there; the block's number where nobody gave one."""
        found = [name for begin, end, name in self.names.get(span.block, []) if begin < span.end and span.begin < end]
        return " | ".join(dict.fromkeys(found)) or f"block {span.block}"

    @property
    def kernels(self) -> list[Kernel]:
        return [each for each in self.entries if isinstance(each, Kernel)]
