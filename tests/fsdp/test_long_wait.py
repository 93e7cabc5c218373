"""A rank that works alone for long: one line says who waits for whom, and the wait goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import members
from harness.fsdp.comm.events import Label
from harness.fsdp.guards import alarm, long_wait, watchdog, watches
from harness.fsdp.guards.long_wait import LongWaits
from harness.fsdp.guards.watchdog import Watchdog
from tests.fsdp.hanging import Told, build, provoke, step
from tests.fsdp.test_store_requests import Counted, by_rank
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

NOTICE_S = 1.0
ALONE_S = 3.0
"""Longer than the notice and two looks take."""
LIMIT_S = 18
"""The groups' timeout less a tenth."""

SLIPS = {
    "nobody asks": Slip(
        Watchdog, "_tell_long_wait", "asks=is_long", "asks=False", "Nothing is said of a wait, however long it is"
    ),
    "who answers is not waited for": Slip(
        LongWaits,
        "answers",
        "not self._roll.is_complete() and time.monotonic() < self._answers_until",
        "False",
        "The line is made of the answers that are there at once",
    ),
    "each rank asks": Slip(
        LongWaits,
        "look",
        'asks and self._store.add(f"{self._prefix}/asked", 1) == 1',
        "asks",
        "Every rank that waits says so, and not the first alone",
    ),
    "who works is not asked": Slip(
        Watchdog,
        "_tell_long_wait",
        "(is_long or is_called)",
        "is_long",
        "Ranks that do not wait long do not say where they are, and are taken for silent ones",
    ),
    "again and again": Slip(
        Watchdog, "_tell_long_wait", "wait.is_told = True", "pass", "The same wait is told again every few seconds"
    ),
}


def working_alone(rank: int) -> tuple[list[str], Told]:
    """What was logged while rank 0 worked alone, and what became of the step."""
    with heard() as lines, mock.patch.object(long_wait, "NOTICE_S", NOTICE_S):
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=LIMIT_S / 0.9))
        _, wrapped, optimizer = build(group, "optim_grads_params")
        dist.barrier()
        if rank == 0:
            time.sleep(ALONE_S)  # saves, say
        told = provoke(lambda: step(wrapped, optimizer))
        dist.barrier()
        wrapped.close()
    return lines, told


def test_one_line_says_who_waits_for_whom_and_the_step_goes_on() -> None:
    found = run_ranks(working_alone, 3)
    assert [told.error for _, told in found] == ["", "", ""], found
    assert found[0][0] == [], "who works alone says nothing"
    assert wrong([line for lines, _ in found for line in lines]) == []


@contextmanager
def heard() -> Iterator[list[str]]:
    """Lines that the watchdogs of this process log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    watchdog.LOG.addHandler(handler)
    try:
        yield lines
    finally:
        watchdog.LOG.removeHandler(handler)


def wrong(lines: list[str]) -> list[str]:
    """What is wrong with the lines of all ranks."""
    if len(lines) != 1:
        return [f"{len(lines)} lines: {lines}"]
    parts = ("ranks 1, 2 wait since ", "in all_gather ", "rank 0 has not come: it is ", f"after {LIMIT_S} s (watchdog")
    return [f"{part!r} is not in {lines[0]!r}" for part in parts if part not in lines[0]]


def looked(ticks: int = 20) -> list[str]:
    """What three watchdogs of one process log, two of which wait for longer than the notice."""
    dogs = by_rank(3, alarm, Counted(), lambda: Watchdog([mock.Mock()], mock.Mock(), float(LIMIT_S), lambda: "here"))
    for dog in dogs[1:]:
        dog._waits[0] = watchdog._Wait((Label("all_gather", "a"),), time.monotonic() - long_wait.NOTICE_S - 1)
    with heard() as lines:
        for _ in range(ticks):
            for dog in dogs:
                dog._tell_long_wait(dog._alarm.is_called())
    for dog in dogs:
        dog.close()
    return lines


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdogs look when they are asked."""
    monkeypatch.setattr(watchdog, "_start", lambda *_: mock.Mock())
    monkeypatch.setattr(Watchdog, "_can_suspect", lambda _: False)


@pytest.mark.usefixtures("no_threads")
def test_each_rank_looks_and_one_says_it() -> None:
    assert wrong(looked()) == []


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("name", each("Deadlocks", [(name, slip.breaks) for name, slip in SLIPS.items()]))
def test_what_says_nothing_or_too_much_of_a_long_wait_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name].put(monkeypatch)
    assert wrong(looked())


# -- the limit ---------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
GIVEN = {None: 1770.0, timedelta(minutes=10): 570.0, timedelta(hours=2): 7170.0, timedelta(seconds=10): 9.0}
"""The limit, by the timeout that init_process_group is given."""


def limits() -> dict[timedelta | None, float]:
    found = {}
    for given in GIVEN:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=given)
        world = dist.group.WORLD
        assert world is not None
        found[given] = watches.usual_limit_s([world], CPU)
        part = members.group_of_members([0], "a part")
        short = dist.new_group([0], timeout=timedelta(seconds=5))
        assert watches.usual_limit_s([world, part], CPU) == found[given], "the engine's own groups"
        assert watches.usual_limit_s([world, short], CPU) == 4.5, "the first backend that gives up"
        dist.destroy_process_group()
    return found


def test_a_wait_may_last_as_long_as_the_groups_say() -> None:
    assert limits() == GIVEN


LIMIT_SLIPS = {
    "300 s": Slip(
        watches, "usual_limit_s", "given - min", "min(given, 300.0) - min", "A rank that saves for six minutes is ended"
    ),
    "torch's timeout": Slip(
        members,
        "group_of_members",
        "timeout_of(like or default), ",
        "",
        "The engine's own groups have torch's timeout whatever init_process_group was given",
    ),
}


@pytest.mark.parametrize("name", each("Deadlocks", [(name, slip.breaks) for name, slip in LIMIT_SLIPS.items()]))
def test_another_limit_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LIMIT_SLIPS[name].put(monkeypatch)
    try:
        assert limits() != GIVEN
    except AssertionError as error:
        assert "the engine's own groups" in str(error)  # noqa: PT017
        dist.destroy_process_group()
