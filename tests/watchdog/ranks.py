"""Watchdogs of many ranks in one process, over one store that counts requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from harness.watchdog import CollectiveError, Watchdog, watchdog

LATE_S = 0.25
"""Seconds that the others wait for the rank that comes last; who asks again and again has the time for it."""


class Counted(dist.Store):
    """A store that counts requests by name, those of its clones too."""

    def __init__(self, inner: Any, requests: list[str] | None = None) -> None:
        super().__init__()
        self.underlying_store = inner
        self.requests: list[str] = [] if requests is None else requests
        self._clones: list[Counted] = []  # torch holds a clone's C++ half alone

    def clone(self) -> Counted:
        self._clones.append(Counted(self.underlying_store.clone(), self.requests))
        return self._clones[-1]


def _counted(name: str) -> Callable[..., Any]:
    def request(self: Counted, *args: Any) -> Any:
        self.requests.append(name)
        return getattr(self.underlying_store, name)(*args)

    return request


for _name in ("set", "get", "add", "wait", "check", "delete_key", "multi_set", "multi_get"):
    setattr(Counted, _name, _counted(_name))


def watchdogs(ranks: int, store: Any, timeout_s: float = 60.0, **options: Any) -> list[Watchdog]:
    """One of each rank; they observe announced collectives."""
    made = []
    for rank in range(ranks):
        with (
            mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(ranks))),
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(watchdog, "stores_of", lambda *_, clones: [store] * clones),
        ):
            made.append(Watchdog([mock.Mock()], timeout_s, records=False, abort=mock.Mock(), **options))
    return made


@contextmanager
def logged() -> Iterator[list[str]]:
    """Lines that the watchdogs of this process log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    watchdog.LOG.addHandler(handler)
    try:
        yield lines
    finally:
        watchdog.LOG.removeHandler(handler)


@contextmanager
def without_threads() -> Iterator[None]:
    with mock.patch.object(watchdog, "_thread", return_value=mock.Mock(spec=threading.Thread)):
        yield


def together(calls: Sequence[Callable[[], Any]], late_s: float = LATE_S) -> list[Any]:
    """Results or CollectiveErrors of calls made at the same time, the last one later."""

    def call(place: int) -> Any:
        time.sleep(late_s if place == len(calls) - 1 else 0)
        try:
            return calls[place]()
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, range(len(calls))))
