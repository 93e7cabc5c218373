"""The message of a hang: positions of ranks, the first difference, and ranks that wait for each other."""

from __future__ import annotations

import pytest

from harness.watchdog import report
from harness.watchdog.report import ONLY_SLOW, SAME_WORK, Position, describe_hang
from tests.support.mutants import Slip, each


def at(waits: str | None, number: int, *names: str, failure: str | None = None) -> Position:
    history = list(enumerate(names, start=number - len(names) + 1))
    return Position("in the forward of u", waits, number if waits else None, 2.0, history, failure)


def test_the_first_collective_in_which_ranks_differ_is_found_behind_their_positions() -> None:
    positions = {0: at("c", 9, "a", "b", "c"), 1: at("c", 9, "a", "b", "c"), 2: at("d", 10, "x", "c", "d")}
    message = describe_hang(positions, [0, 1, 2, 3], 60)
    assert "mismatch, collective number 8 is not the same on all ranks: ranks 0, 1 at b; rank 2 at x" in message
    assert "ranks 0, 1 wait since 2.0 s in c (number 9) in the forward of u" in message
    assert "rank 3 does not answer" in message


def test_ranks_in_step_have_no_mismatch() -> None:
    message = describe_hang({0: at("b", 2, "a", "b"), 1: at(None, 1, "a")}, [0, 1], 60)
    assert message.endswith(f". {SAME_WORK}{ONLY_SLOW}")
    assert "mismatch" not in message
    assert "rank 1 has not come: it is in the forward of u; the last collective it began is a (number 1)" in message


def test_where_a_rank_is_gone_or_failed_there_is_no_advice_to_run_the_same() -> None:
    for positions in ({0: at("b", 2, "a", "b")}, {0: at("b", 2, "b"), 1: at(None, 2, "b", failure="reset by peer")}):
        assert SAME_WORK not in describe_hang(positions, [0, 1], 60)


# -- ranks that wait for each other ------------------------------------------------------------------------------------


def waiting(*waits: str, **begun: int) -> Position:
    """Waits by the names they are for, "a+b" for one of two."""
    waited = [name.split("+") if name else [] for name in waits]
    return Position("", None, None, 0.0, [], waited=waited, begun=begun)


STANDS: dict[str, tuple[bool, list[Position]]] = {
    "each lacks the other's": (True, [waiting("a", a=2), waiting("b", a=1, b=1)]),
    "around three ranks": (True, [waiting("a", a=1, c=1), waiting("b", a=1, b=1), waiting("c", b=1, c=1)]),
    "one of two is enough": (True, [waiting("a+b", a=1, b=1, c=1), waiting("d", a=1, c=1, d=1)]),
    "all have begun it": (False, [waiting("a", a=2), waiting("a", a=2)]),
    "the second is on its way": (False, [waiting("a", a=2, b=3), waiting("b", a=1, b=3), waiting("b", a=1, b=3)]),
    "one of a rank's two waits is on its way": (False, [waiting("a", "c", a=2, c=1), waiting("b", a=1, b=1, c=1)]),
    "no name is known": (False, [waiting("a", a=2), waiting("", a=1, b=1)]),
    "one waits for nothing": (False, [waiting("a", a=2), waiting(a=1, b=1)]),
}


@pytest.mark.parametrize("name", STANDS)
def test_ranks_are_stuck_where_each_wait_is_for_a_collective_that_another_has_not_begun(name: str) -> None:
    stuck, positions = STANDS[name]
    assert report.all_stuck(dict(enumerate(positions))) is stuck


SLIPS = {
    "one wait is enough": (
        "A rank is taken for stuck though one of its waits is for what all have begun",
        Slip(report, "all_stuck", "all(_is_vain", "any(_is_vain"),
    ),
    "slow is stuck": (
        "Ranks whose exchange is slow are taken for stuck",
        Slip(report, "_is_vain", "count > each", "count >= each"),
    ),
    "two ranks alone": (
        "Ranks that wait for each other in a circle are not seen",
        Slip(report, "_is_vain", "for each in others)", "for each in others[:1])"),
    ),
    "who computes is asked, too": (
        "A rank that is late is taken for one that waits",
        Slip(report, "all_stuck", "each.waited and ", ""),
    ),
}


@pytest.mark.parametrize("name", each("Deadlocks", [(name, breaks) for name, (breaks, _) in SLIPS.items()]))
def test_a_wrong_judgement_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name][1].put(monkeypatch)
    assert any(report.all_stuck(dict(enumerate(found))) is not stuck for stuck, found in STANDS.values())
