"""One process keeps the store of all ranks: how much a rank asks of it does not grow with their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import CollectiveError
from harness.fsdp.comm.events import Label
from harness.fsdp.guards import alarm, collective_check
from harness.fsdp.guards.alarm import Alarm, RollCall
from harness.fsdp.guards.collective_check import CollectiveCheck
from harness.fsdp.guards.deadlock import Stand, Stands
from harness.fsdp.guards.hang_report import Position, ranks_text
from tests.support.mutants import each

FEW, MANY = 4, 48
"""Ranks, each a thread of this process."""
MOST = 10
"""Requests of a rank, on average, for one collective that is compared or one message that is agreed on."""
LATE_S = 0.25
"""Seconds that the others wait for the rank that comes last; who asks again and again has the time for it."""


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._lock = threading.Lock()
        self.requests = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        asked: Callable[..., Any] = getattr(self._store, name)

        def request(*args: Any) -> Any:
            with self._lock:
                self.requests += 1
            return asked(*args)

        return request


def by_rank(ranks: int, module: Any, store: Counted, make: Callable[[], Any]) -> list[Any]:
    """One of each rank, that all use one store."""
    made = []
    for rank in range(ranks):
        with (
            mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(ranks))),
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(module, "stores_of", lambda *_, clones, **__: [store] * clones),
        ):
            made.append(make())
    return made


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returned or raised; they ran at the same time, and the last one began late."""

    def call(place: int) -> Any:
        if place == len(calls) - 1:
            threading.Event().wait(LATE_S)
        try:
            return calls[place]()
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, range(len(calls))))


def compared(ranks: int, *, differ: bool = False) -> tuple[int, list[Any]]:
    """Requests for a collective that ranks compare, and what each was told."""
    store = Counted()
    checks = by_rank(ranks, collective_check, store, lambda: CollectiveCheck(mock.Mock(), 60.0))
    lengths = [3 if differ and rank == 1 else 2 for rank in range(ranks)]
    told = together(
        [
            partial(check._check, Label("all_gather", "weights"), [torch.zeros(length)])
            for check, length in zip(checks, lengths, strict=True)
        ]
    )
    for check in checks:
        check.close()
    return store.requests, told


def agreed(ranks: int) -> tuple[int, list[Any]]:
    """Requests for a message on which ranks agree, and the messages."""
    store = Counted()
    alarms = by_rank(ranks, alarm, store, lambda: Alarm(mock.Mock(), 60.0, 0.5))
    position = Position(where="in the forward", waits="all_gather", number=1, seconds=61.0, history=[(1, "all_gather")])
    messages = together([partial(each.agree, position) for each in alarms])
    return store.requests, messages


def _asking_too_much() -> list[str]:
    found = []
    for ranks in (FEW, MANY):
        requests, told = compared(ranks)
        assert told == [None] * ranks
        asked, messages = agreed(ranks)
        assert len(set(messages)) == 1
        assert f"{ranks_text(range(ranks))} wait since 61.0 s in all_gather" in messages[0]
        found += [
            f"{each} requests of {ranks} ranks for a {what}"
            for what, each in (("collective", requests), ("message", asked))
            if each > MOST * ranks
        ]
    return found


def test_a_rank_asks_a_few_times_however_many_there_are() -> None:
    assert _asking_too_much() == []


def test_all_are_told_of_the_one_that_differs() -> None:
    requests, told = compared(MANY, differ=True)
    assert requests <= MOST * MANY
    assert {type(each) for each in told} == {CollectiveError}
    (message,) = set(map(str, told))
    assert f"of 2 elements float32 on {ranks_text([0, *range(2, MANY)])}" in message
    assert "of 3 elements float32 on rank 1" in message


def test_while_all_is_well_a_rank_looks_once_a_tick() -> None:
    store = Counted()
    alarms = by_rank(MANY, alarm, store, lambda: Alarm(mock.Mock(), 60.0, 0.5))
    stands = [Stands(store, range(MANY), rank) for rank in range(MANY)]
    for one, stand in zip(alarms, stands, strict=True):
        assert not one.is_called()
        stand.tell(None)
        assert not stand.is_deadlock()
    assert store.requests == MANY
    told = Stand([["all_gather"]], {"all_gather": 1})
    for _ in range(3):  # as long as it waits
        for stand in stands[1:]:
            stand.tell(told)
            assert not stand.is_deadlock()
    assert store.requests == MANY + MANY - 1


def _all_read(self: CollectiveCheck, label: Label, data: Sequence[Any]) -> None:
    self._number += 1
    keys = [f"{self._number}/{rank}" for rank in self.ranks]
    self._store.set(keys[self.rank], str(label))
    self._store.wait(keys, timedelta(seconds=self._limit_s))
    assert len({self._store.get(key) for key in keys}) == 1


def _asked_again(self: RollCall, limit_s: float) -> None:
    while len(self.positions()) < len(self._ranks):
        pass


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "all read all": (
        "Each rank reads what each has told of a collective",
        lambda: mock.patch.object(CollectiveCheck, "_check", _all_read),
    ),
    "asked again": (
        "Who makes the message asks again and again who has answered",
        lambda: mock.patch.object(RollCall, "wait", _asked_again),
    ),
}


@pytest.mark.parametrize("name", each("What ranks ask of their store", [(n, m[0]) for n, m in MUTANTS.items()]))
def test_who_asks_too_much_is_found(name: str) -> None:
    with MUTANTS[name][1]():
        assert _asking_too_much()
