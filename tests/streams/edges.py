"""What breaks without each edge: every wait of the engine is left out of the log in turn, by the line that asks for it.

What is left out are the waits of streams for events and for the ends of collectives, and the stops of the host that are
there for the order alone. A number that the host reads is no edge: it could not go on without it.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import NamedTuple

from tests.streams.log import Entry, Log, Stop, Wait
from tests.streams.races import Race, races_of
from tests.streams.site import ROOT


class Edge(NamedTuple):
    """A line that orders something. kind: what waits, and for what."""

    file: str
    function: str
    source: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.source}"


class Without(NamedTuple):
    """A log without one edge: what was left out how often, and a race there is then, if any."""

    edge: Edge
    times: int
    race: Race | None


KINDS = {"event": "stream waits for event", "work": "stream waits for collective"}
STOPS = "host waits for stream"

REASONS = {
    "register": "a registration meets all ranks: nothing of this one may be in flight, whatever bytes it touches",
}
"""Functions with an edge that orders no two accesses to memory, and what it is for."""


def edges_of(log: Log) -> dict[Edge, set[int]]:
    found: dict[Edge, set[int]] = {}
    for number, entry in enumerate(log.entries):
        edge = _edge_of(entry)
        if edge is not None:
            found.setdefault(edge, set()).add(number)
    return found


def _edge_of(entry: Entry) -> Edge | None:
    if isinstance(entry, Wait) and entry.site.in_engine and entry.why in KINDS:
        kind = KINDS[entry.why]
    elif isinstance(entry, Stop) and entry.site.in_engine and entry.why == "synchronize":
        kind = STOPS
    else:
        return None
    site = entry.site
    return Edge(site.file, site.function, linecache.getline(ROOT + site.file, site.line).strip(), kind)


def without_each(log: Log) -> list[Without]:
    found = []
    for edge, numbers in edges_of(log).items():
        left_out = {id(log.entries[number]) for number in numbers}
        races = races_of(log, lambda entry, gone=left_out: id(entry) in gone)  # type: ignore[misc] # mypy and defaults
        found.append(Without(edge, len(numbers), races[0] if races else None))
    return found


def needed(tables: Iterable[list[Without]]) -> dict[Edge, list[Without]]:
    found: dict[Edge, list[Without]] = {}
    for table in tables:
        for each in table:
            found.setdefault(each.edge, []).append(each)
    return found
