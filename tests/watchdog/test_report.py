"""Ranks that wait for each other, by what each of them tells."""

from __future__ import annotations

import pytest

from harness.watchdog import report
from harness.watchdog.report import Position
from tests.support.mutants import each_found_by


def test_where_a_rank_is_gone_or_failed_there_is_no_advice_to_run_the_same() -> None:
    waits = Position("in u", "b (number 2)", 2.0, [(2, "b")])
    for others in ({}, {1: Position("in u", None, 2.0, [(2, "b")], "reset by peer")}):
        assert report.SAME_WORK not in report.describe_hang({0: waits, **others}, [0, 1], 60)


def waiting(*waits: str, history: str = "", **begun: int) -> Position:
    """Waits by the names they are for, "a+b" for one of two. history: a letter for each collective."""
    waited = [name.split("+") if name else [] for name in waits]
    return Position("", None, 0.0, [*enumerate(history)], waited=waited, begun=begun)


STANDS: dict[str, tuple[bool, list[Position]]] = {
    "each lacks the other's": (True, [waiting("a", a=2), waiting("b", a=1, b=1)]),
    "around three ranks": (True, [waiting("a", a=1, c=1), waiting("b", a=1, b=1), waiting("c", b=1, c=1)]),
    "one of two is enough": (True, [waiting("a+b", a=1, b=1, c=1), waiting("d", a=1, c=1, d=1)]),
    "all have begun it": (False, [waiting("a", a=2), waiting("a", a=2)]),
    "the second is on its way": (False, [waiting("a", a=2, b=3), waiting("b", a=1, b=3), waiting("b", a=1, b=3)]),
    "one of a rank's two waits is on its way": (False, [waiting("a", "c", a=2, c=1), waiting("b", a=1, b=1, c=1)]),
    "no name is known": (False, [waiting("a", a=2), waiting("", a=1, b=1)]),
    "one waits for nothing": (False, [waiting("a", a=2), waiting(a=1, b=1)]),
    "others came before": (True, [waiting("a", history="bca", a=1), waiting("a", history="cba", a=1)]),
    "one is further": (False, [waiting("a", history="bca", a=1), waiting("a", history="bc", a=1)]),
    "one still computes": (False, [waiting("a", history="bca", a=1), waiting(history="cba", a=1)]),
}


@pytest.mark.parametrize("name", STANDS)
def test_ranks_are_stuck_where_each_wait_is_for_a_collective_that_another_has_not_begun(name: str) -> None:
    stuck, positions = STANDS[name]
    assert report.all_stuck(dict(enumerate(positions))) is stuck


test_a_wrong_judgement_is_found = each_found_by(
    "Deadlocks",
    """
    one wait is enough: A rank is taken for stuck though one of its waits is for what all have begun
        watchdog.report.all_stuck: all(_is_vain => any(_is_vain
    slow is stuck: Ranks whose exchange is slow are taken for stuck
        watchdog.report._is_vain: count > each => count >= each
    two ranks alone: Ranks that wait for each other in a circle are not seen
        watchdog.report._is_vain: for each in others) => for each in others[:1])
    names alone: Ranks that began different collectives before, which gloo pairs by their order, wait until the limit
        watchdog.report.all_stuck: is_mixed or all( => all(
    who computes is asked, too: A rank that is late is taken for one that waits
        watchdog.report.all_stuck: each.waited and ( => (
    advice to the gone: Ranks are told to run the same where one of them has ended
        watchdog.report.describe_hang: advice if len(positions) == len(ranks) else '' => advice
    advice to the failed: Ranks are told to run the same where a backend has failed
        watchdog.report.describe_hang: cause, advice = "a collective failed", "" => cause = "a collective failed"
    """,
    test_where_a_rank_is_gone_or_failed_there_is_no_advice_to_run_the_same,
    test_ranks_are_stuck_where_each_wait_is_for_a_collective_that_another_has_not_begun,
)
