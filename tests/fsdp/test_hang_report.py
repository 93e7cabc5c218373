"""The sentence that tells of a hang: who waits where, who has not come, and where ranks first differ."""

from __future__ import annotations

from harness.fsdp.guards.hang_report import ONLY_SLOW, SAME_WORK, Position, tell


def at(waits: str | None, number: int, *names: str, failure: str | None = None) -> Position:
    history = list(enumerate(names, start=number - len(names) + 1))
    return Position("in the forward of u", waits, number if waits else None, 2.0, history, failure)


def test_the_first_collective_in_which_ranks_differ_is_found_behind_where_they_stand() -> None:
    positions = {0: at("c", 9, "a", "b", "c"), 1: at("c", 9, "a", "b", "c"), 2: at("d", 10, "x", "c", "d")}
    message = tell(positions, [0, 1, 2, 3], 60)
    assert "mismatch, collective number 8 is not the same on all ranks: ranks 0, 1 at b; rank 2 at x" in message
    assert "ranks 0, 1 wait since 2.0 s in c (number 9) in the forward of u" in message
    assert "rank 3 does not answer" in message


def test_ranks_in_step_have_no_mismatch() -> None:
    positions = {0: at("b", 2, "a", "b"), 1: at(None, 1, "a")}
    message = tell(positions, [0, 1], 60)
    assert message.endswith(f". {SAME_WORK}{ONLY_SLOW}")
    assert "mismatch" not in message
    assert "rank 1 has not come: it is in the forward of u; the last collective it began is a (number 1)" in message


def test_where_a_rank_is_gone_or_failed_nobody_is_told_to_run_the_same() -> None:
    for positions in ({0: at("b", 2, "a", "b")}, {0: at("b", 2, "b"), 1: at(None, 2, "b", failure="reset by peer")}):
        assert SAME_WORK not in tell(positions, [0, 1], 60)
