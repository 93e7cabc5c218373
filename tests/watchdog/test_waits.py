"""Waits of a rank: on a device, and those that a rank may count in a search for deadlocks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.watchdog import CollectiveError, Watchdog, watchdog
from harness.watchdog.waits import Waits
from tests.support.mutants import each_found_by
from tests.support.spawn import run_ranks
from tests.watchdog.ranks import together, watchdogs, without_threads

LIMIT_S = 1.0


class FakeEvent:
    def __init__(self) -> None:
        self.is_reached = False


def test_a_wait_lasts_since_its_stream_came_to_it_however_far_ahead_the_host_was() -> None:
    waits = Waits(FakeEvent, None)
    for name in "ab":
        waits.leave(waits.enter((name,), None))
    first, second = waits.on_device
    for wait in (first, second):
        wait.since -= 2 * LIMIT_S  # when the host asked for it
    assert waits.late(LIMIT_S) == [first]
    first.reached.is_reached = True
    assert waits.late(LIMIT_S) == []
    second.since -= 2 * LIMIT_S
    assert waits.late(LIMIT_S) == [second]


def test_a_stream_that_never_passes_a_collective_is_an_error_at_the_next_one() -> None:
    dogs = watchdogs(2, dist.HashStore(), LIMIT_S, mark=FakeEvent, where=lambda: "in the backward of blocks.0")
    for dog in dogs:
        dog.begin("all_gather blocks.0")
        with dog.waiting("all_gather blocks.0"):
            pass
        assert dog.waits.late(LIMIT_S) == []
    dogs[1].waits.on_device[0].reached.is_reached = True
    errors = together([lambda dog=dog: dog._concluded.wait(10) and dog.begin("next") for dog in dogs], 0)
    (message,) = set(map(str, errors))
    assert "rank 0 waits since" in message
    assert "all_gather blocks.0 (number 1) in the backward of blocks.0" in message
    assert "rank 1 has not come" in message
    assert [dog._abort.call_count for dog in dogs] == [1, 1]
    for dog in dogs:
        dog.close()


def raised_in_later_groups(rank: int) -> list[bool]:
    """True where `begin` raises of a watchdog whose alarm is over: in its group, and after that was destroyed."""
    group = dist.new_group([rank])
    raised, dog = [], Watchdog([group], LIMIT_S)
    dog.message = "a hang"
    for _ in range(2):
        try:
            dog.begin("next")
            raised.append(False)
        except CollectiveError:
            raised.append(True)
        if not raised[1:]:
            dist.destroy_process_group(group)
    return raised


def test_an_alarm_ends_with_its_groups() -> None:
    assert run_ranks(raised_in_later_groups, 1) == [[True, False]]


def test_errors_of_the_program_are_left_alone() -> None:
    dog = object.__new__(Watchdog)
    for error in (ArithmeticError("gloo"), RuntimeError("a bucket was summed before it was exchanged")):
        assert dog.explain(error) is error
    known = CollectiveError("Connection")
    assert dog.explain(known) is known


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_limit_is_positive(seconds: float) -> None:
    with without_threads(), pytest.raises(ValueError, match="must be above 0 seconds"):
        watchdogs(2, dist.HashStore(), seconds)


# -- waits that count in a search for deadlocks ------------------------------------------------------------------------


def is_counted(waits: Waits) -> bool:
    """True if the wait counts of a rank that has begun a collective and waits for it."""
    waits.begin("a")
    token = waits.enter(("a",), None)
    try:
        return waits.are_blocked(-1.0)
    finally:
        waits.leave(token)


def test_waits_of_one_model_count() -> None:
    waits, other = Waits(None, None), Waits(None, None)
    with mock.patch.object(Waits, "live", {waits}):
        counted = [is_counted(waits)]
        Waits.live.add(other)
        counted.append(is_counted(waits))
        Waits.live.discard(other)
        counted.append(is_counted(waits))
    assert counted == [True, False, False], "of one model, of two, and where there were two"


def test_parts_of_ranks_and_short_limits_are_not_judged() -> None:
    found = [suspects(60.0, [0, 1]), suspects(60.0, [0, 1], [0]), suspects(2 * watchdog.SUSPECT_S, [0, 1])]
    assert found == [True, False, False]


def suspects(limit_s: float, *groups: list[int]) -> bool:
    with (
        mock.patch.object(dist, "get_process_group_ranks", side_effect=lambda group: group),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(watchdog, "_is_registered", return_value=False),
        mock.patch.object(watchdog, "stores_of", lambda *_, clones: [dist.HashStore()] * clones),
        without_threads(),
    ):
        dog = Watchdog(list(groups), limit_s, records=False)
        dog.close()
        return dog._suspects


# -- the limit ---------------------------------------------------------------------------------------------------------

GIVEN = {None: 1770.0, timedelta(minutes=10): 570.0, timedelta(hours=2): 7170.0, timedelta(seconds=10): 9.0}
"""The limit, by the timeout that init_process_group is given."""


def limits() -> dict[timedelta | None, float]:
    found = {}
    for given in GIVEN:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=given)
        world: Any = dist.group.WORLD
        found[given] = watchdog.default_timeout_s([world], torch.device("cpu"))
        short: Any = dist.new_group([0], timeout=timedelta(seconds=5))
        assert watchdog.default_timeout_s([world, short]) == 4.5, "the first backend that gives up"
        assert Watchdog().timeout_s == found[given]
        dist.destroy_process_group()
    return found


def test_a_wait_may_last_as_long_as_the_groups_say() -> None:
    assert limits() == GIVEN


test_a_mutant_is_found = each_found_by(
    "Deadlocks",
    """
    alarms for ever: A hang is raised after its groups
        watchdog.watchdog.Watchdog.check: None and not is_destroyed => None
    several models: A rank tells collectives among which those of another model are, which other ranks do not have
        watchdog.waits.Waits.begin: == 1 => >= 1
    300 s: A rank that saves for six minutes is ended
        watchdog.watchdog.default_timeout_s: given - min => min(given, 300.0) - min
    since the host asked: A wait on a device counts from when the host came to it, far ahead of its stream
        watchdog.waits.Waits.all: self.on_device[0].since = time.monotonic() => pass
    behind another: Waits that a stream has not come to are late, too
        watchdog.waits.Waits.all: list(self.on_device)[:1] => self.on_device
    parts of ranks: Ranks are suspected by collectives in which only some take part
        watchdog.watchdog.Watchdog.__init__: not records and everywhere => not records
    short limits: Ranks are suspected where the limit ends the wait as soon
        watchdog.watchdog.Watchdog.__init__: self.timeout_s > 2 * SUSPECT_S => self.timeout_s > SUSPECT_S
    no time at all: A limit of 0 seconds is taken, by which every wait is late
        watchdog.watchdog.Watchdog.__init__: if not self.timeout_s > 0: => if self.timeout_s < 0:
    """,
    test_waits_of_one_model_count,
    test_a_wait_lasts_since_its_stream_came_to_it_however_far_ahead_the_host_was,
    test_parts_of_ranks_and_short_limits_are_not_judged,
    test_a_limit_is_positive,
    test_an_alarm_ends_with_its_groups,
    test_a_wait_may_last_as_long_as_the_groups_say,
)
