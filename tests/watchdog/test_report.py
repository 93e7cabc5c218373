"""Ranks that wait for each other, by what each of them tells."""

from __future__ import annotations

import pytest

from harness.watchdog import waits as report
from harness.watchdog.waits import Position
from tests.support.mutants import each_found_by


def test_where_a_rank_is_gone_or_failed_there_is_no_advice_to_run_the_same() -> None:
    waits = Position("in u", "b (number 2)", 2.0, [(2, "b")])
    for others in ({}, {1: Position("in u", None, 2.0, [(2, "b")], "reset by peer")}):
        assert report.SAME_WORK not in report.describe_hang({0: waits, **others}, [0, 1], 60)


STANDS: dict[str, tuple[bool, list[str]]] = {
    "each lacks the other's": (True, ["aa", "ab"]),
    "around three ranks": (True, ["ca", "ab", "bc"]),
    "all have begun it": (False, ["aa", "aa"]),
    "the second is on its way": (False, ["bba", "bb", "bb"]),
    "others came before": (True, ["bca", "cba"]),
    "one still computes": (False, ["bca", "cba computes"]),
}
"""By the collectives that each rank has begun, a letter each."""


@pytest.mark.parametrize("name", STANDS)
def test_ranks_are_stuck_where_all_wait_and_began_different_collectives(name: str) -> None:
    stuck, histories = STANDS[name]
    assert stuck is report.all_stuck(
        {
            rank: Position("", None, 0.0, [*enumerate(history.split()[0])], is_blocked=" " not in history)
            for rank, history in enumerate(histories)
        }
    )


test_a_wrong_judgement_is_found = each_found_by(
    "Deadlocks",
    """
    slow is stuck: Ranks whose exchange is slow are taken for stuck
        watchdog.waits.all_stuck: and bool(first_difference(positions)) => and True
    names alone: Ranks that began different collectives before, which gloo pairs by their order, wait until the limit
        watchdog.waits.first_difference: sorted(set().union(*histories.values())) => sorted(histories[0])[-1:]
    three sides: Ranks that began two different collectives are taken for alike
        watchdog.waits.first_difference: len(set(names.values())) > 1 => len(set(names.values())) > 2
    who computes is asked, too: A rank that is late is taken for one that waits
        watchdog.waits.all_stuck: all(each.is_blocked => any(each.is_blocked
    advice to the gone: Ranks are told to run the same where one of them has ended
        watchdog.waits.describe_hang: advice if len(positions) == len(ranks) else '' => advice
    advice to the failed: Ranks are told to run the same where a backend has failed
        watchdog.waits.describe_hang: cause, advice = "a collective failed", "" => cause = "a collective failed"
    """,
    test_where_a_rank_is_gone_or_failed_there_is_no_advice_to_run_the_same,
    test_ranks_are_stuck_where_all_wait_and_began_different_collectives,
)
