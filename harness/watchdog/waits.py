"""Collectives and waits of this rank: those a program announces, and those that c10d's flight recorder has.

On CUDA a wait blocks a stream and not the host, so an announced wait is over at once. There an event is left behind it,
and the wait lasts until the stream has come to it. A host runs ahead of its device: so a wait lasts no longer than
since the stream was seen to have passed the one before it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from harness.private_torch import flight_recorder

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
        found: list[dict[str, Any]] = json.loads(self._dump(True, only_active)).get("entries", [])
        return found


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
