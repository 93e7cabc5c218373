"""Waits of ranks: those a program announces, and those that c10d's flight recorder has; and the message made of them.

On CUDA a wait blocks a stream and not the host, so an announced wait is over at once. There an event is left behind it,
and the wait lasts until the stream has come to it. A host runs ahead of its device: so a wait lasts no longer than
since the stream was seen to have passed the one before it.

[Note: Mutual waits] Ranks that wait for each other are found before a wait is over the limit: all wait long, and began
different collectives. Backends pair collectives by their order and not by names, so what all wait for is another pair.
Where ranks began the same ones, the rank that began fewest waits for one that all have begun: the exchange is slow.
Positions may be of different moments, since histories only grow.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch.distributed as dist

from harness.private_torch import flight_recorder

SAME_WORK = (
    "All ranks must run the same forwards, backwards and steps, and the same units in them: a rank that has no data, or"
    " leaves a batch out, runs one with its loss times 0"
)


class CollectiveError(RuntimeError):
    """A collective did not complete: a rank waited too long, ended, or ran another collective. All ranks that can be
    reached raise it with the same message, which names ranks and collectives."""


@dataclass
class Position:
    """One rank's position.

    where: place in the program. waits: the collective it waits for and, if known, that one's place among all this rank
    has begun; None if it waits for none. seconds: since when. history: number and name of its last collectives.
    failure: error of its backend. is_blocked: its main thread waits long.
    """

    where: str
    waits: str | None
    seconds: float
    history: list[tuple[int, str]]
    failure: str | None = None
    is_blocked: bool = False


Positions = Mapping[int, Position]


def describe_hang(positions: Positions, ranks: Sequence[int], timeout_s: float, *, is_deadlock: bool = False) -> str:
    """Names the collective in which ranks first differ, and every rank's position."""
    said = [f"the backend of rank {rank} said: {p.failure}" for rank, p in sorted(positions.items()) if p.failure]
    parts = [first_difference(positions), *_waiting(positions), *_absent(positions, ranks), *said]
    advice = f". {SAME_WORK}{'' if is_deadlock else '. Where a rank is only slow, set watchdog_timeout_s higher'}"
    cause = f"a collective did not come about within {timeout_s:g} s"
    if any(each.failure for each in positions.values()):
        cause, advice = "a collective failed", ""
    elif is_deadlock:
        cause = "ranks wait for each other, each for a collective that another one has not begun in its place"
    return f"{cause}: {'; '.join(filter(None, parts))}{advice if len(positions) == len(ranks) else ''}"


def all_stuck(positions: Positions) -> bool:
    """True if all ranks wait long, and began different collectives; see [Note: Mutual waits]."""
    return all(each.is_blocked for each in positions.values()) and bool(first_difference(positions))


def first_difference(positions: Positions) -> str:
    """The first number at which ranks began different collectives; "" if there is none in their histories."""
    histories = {rank: {int(number): name for number, name in each.history} for rank, each in positions.items()}
    for number in sorted(set().union(*histories.values())):
        names = {rank: history[number] for rank, history in histories.items() if number in history}
        if len(set(names.values())) > 1:
            sides = "; ".join(f"{ranks_text(ranks)} at {name}" for name, ranks in by_value(names).items())
            return f"mismatch, collective number {number} is not the same on all ranks: {sides}"
    return ""


def _waiting(positions: Positions) -> list[str]:
    places = {rank: f"{each.waits} {each.where}" for rank, each in positions.items() if each.waits is not None}
    return [
        f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} since"
        f" {max(positions[rank].seconds for rank in ranks):.1f} s in {place}"
        for place, ranks in by_value(places).items()
    ]


def _absent(positions: Positions, ranks: Sequence[int]) -> list[str]:
    """Ranks that wait for nothing, and ranks that do not answer."""
    parts = []
    for rank, each in sorted(positions.items()):
        if each.waits is None:
            came = "failed" if each.failure else "has not come: it is"
            last = [f"; the last collective it began is {name} (number {number})" for number, name in each.history[-1:]]
            parts.append(f"rank {rank} {came} {each.where}{''.join(last) or ' and has begun no collective'}")
    if silent := [rank for rank in ranks if rank not in positions]:
        parts.append(
            f"{ranks_text(silent)} do{'es' if len(silent) == 1 else ''} not answer: ended, stopped, or inside a call"
            " that lets no other thread run (the rank's own log tells)"
        )
    return parts


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1`; at most eight by number."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


HISTORY = 256
"""Collectives remembered, to find the first one in which ranks differ."""
_MAIN = threading.main_thread().ident


@dataclass
class Wait:
    """group: aborted too, where it is none of the watchdog's. reached: event behind a wait on a device. number: place
    of the collective, 0 if unknown."""

    labels: tuple[Hashable, ...]
    since: float
    group: dist.ProcessGroup | None = None
    reached: Any = None
    number: int = 0
    is_main: bool = False


class FlightRecorder:
    """Collectives of any program in these groups, as c10d records them; history of the first group alone."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._names = [group.group_name for group in groups]
        self._waits: dict[int, Wait] = {}  # kept, so that a clock that is set makes none of them late
        self._dump = flight_recorder("nccl" if dist.get_backend(groups[0]) == "nccl" else "fr")

    def in_flight(self) -> list[Wait]:
        began = time.monotonic() - time.time()
        self._waits = {
            (key := each["record_id"]): self._waits.get(key)
            or Wait((_name(each),), began + each["time_created_ns"] / 1e9, number=_number(each))
            for each in self._entries(only_active=True)
            if not each["retired"] and each["process_group"][0] in self._names
        }
        return list(self._waits.values())

    def history(self) -> list[tuple[int, str]]:
        entries = [each for each in self._entries(only_active=False) if each["process_group"][0] == self._names[0]]
        return [(_number(each), _name(each)) for each in entries if not each["is_p2p"]][-HISTORY:]

    def _entries(self, only_active: bool) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], json.loads(self._dump(True, only_active)).get("entries", []))


def _number(entry: dict[str, Any]) -> int:
    return 0 if entry["is_p2p"] else int(entry["collective_seq_id"])


def _name(entry: dict[str, Any]) -> str:
    """`all_reduce of 8x8+8 Float`."""
    sizes = "+".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
    kind = entry["profiling_name"].partition(":")[2]
    return f"{kind} of {sizes} {'/'.join(dict.fromkeys(entry['input_dtypes']))}" if sizes else kind


class Waits:
    """Waits of this rank, and the collectives it has announced.

    Args:
        mark: leaves an event on the current stream, with `is_reached`; None on a CPU.
        recorder: None if the program announces all its waits.
    """

    live: set[Waits] = set()  # noqa: RUF012 # of this process

    def __init__(self, mark: Callable[[], Any] | None, recorder: FlightRecorder | None) -> None:
        self.announced: dict[int, Wait] = {}
        self.on_device: deque[Wait] = deque()
        self._recent: deque[tuple[int, Hashable]] = deque(maxlen=HISTORY)
        self._is_of_one_model = True
        self._mark, self._recorder = mark, recorder
        self._numbers, self._tokens = count(1), count()
        self._lock = threading.Lock()

    def begin(self, label: Hashable) -> None:
        self._is_of_one_model &= len(Waits.live) == 1  # other ranks may have no other model
        self._recent.append((next(self._numbers), label))

    def enter(self, labels: tuple[Hashable, ...], group: dist.ProcessGroup | None) -> int:
        token = next(self._tokens)
        self.announced[token] = Wait(labels, time.monotonic(), group, is_main=threading.get_ident() == _MAIN)
        return token

    def leave(self, token: int) -> None:
        wait = self.announced.pop(token)
        if self._mark is not None and wait.group is None:
            wait.reached = self._mark()
            self.on_device.append(wait)

    def all(self) -> list[Wait]:
        """Waits that are not over, the innermost last."""
        with self._lock:
            while self.on_device and self.on_device[0].reached.is_reached:
                self.on_device.popleft()
                if self.on_device:
                    self.on_device[0].since = time.monotonic()
            recorded = [] if self._recorder is None else self._recorder.in_flight()
        return [*list(self.on_device)[:1], *recorded, *list(self.announced.values())]

    def late(self, limit_s: float) -> list[Wait]:
        limit = time.monotonic() - limit_s
        return [wait for wait in self.all() if wait.since < limit]

    def are_blocked(self, limit_s: float) -> bool:
        """True if the main thread has stood still for longer, in a process of one model; see [Note: Mutual waits]."""
        limit = time.monotonic() - limit_s
        waits = list(self.announced.values())
        return self._is_of_one_model and any(wait.is_main and wait.since < limit for wait in waits)

    def name_of(self, wait: Wait) -> str:
        """The collectives, and the place of the first among those that were begun where that is known."""
        numbers = {label: number for number, label in list(self._recent)}
        number = wait.number or min((numbers.get(label, 0) for label in wait.labels), default=0)
        name = " and ".join(map(str, wait.labels)) or "a collective begun before"
        return f"{name} (number {number})" if number else name

    def history(self) -> list[tuple[int, str]]:
        announced = [(number, str(label)) for number, label in list(self._recent)]
        return announced or ([] if self._recorder is None else self._recorder.history())
