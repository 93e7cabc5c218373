"""The two searches over simulated histories and sets of changes: broken stretches, lines that turn twice, unresolved
subsets."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import assume, given, strategies as st

from harness.bisect.trials import Answer, first_differing, smallest

SAME, DIFFERS, BROKEN = Answer.same, Answer.differs, Answer.unresolved

inner = st.lists(st.sampled_from(Answer), max_size=40)
histories = inner.map(lambda middle: [SAME, *middle, DIFFERS])


class Line:
    """A history that counts how often it is asked."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.asked: list[int] = []

    def __call__(self, at: int, left: int) -> Answer:
        assert left >= 1
        self.asked.append(at)
        return self.answers[at]


@given(st.integers(2, 300), st.data())
def test_a_line_that_turns_once_is_solved_in_log2_trials(count: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(1, count - 1))
    line = Line([SAME] * turn + [DIFFERS] * (count - turn))
    span = first_differing(count, line)
    assert (span.same, span.differs) == (turn - 1, turn)
    assert len(line.asked) <= ceil(log2(count - 1)) if count > 2 else not line.asked


@given(histories)
def test_what_is_found_is_a_turn_and_all_between_was_tried_in_vain(answers: list[Answer]) -> None:
    line = Line(answers)
    span = first_differing(len(answers), line)
    assert answers[span.same] is SAME
    assert answers[span.differs] is DIFFERS
    assert span.same < span.differs
    assert all(answers[at] is BROKEN for at in range(span.same + 1, span.differs))
    assert set(range(span.same + 1, span.differs)) <= set(line.asked)


@given(histories)
def test_nothing_is_tried_twice_nor_at_the_ends(answers: list[Answer]) -> None:
    line = Line(answers)
    first_differing(len(answers), line)
    assert len(line.asked) == len(set(line.asked))
    assert not {0, len(answers) - 1} & set(line.asked)


@given(st.integers(4, 400), st.data())
def test_a_broken_stretch_away_from_the_turn_is_left_quickly(count: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(1, count - 1))
    start = data.draw(st.integers(1, count - 2))
    end = data.draw(st.integers(start, count - 2))
    answers = [SAME] * turn + [DIFFERS] * (count - turn)
    assume(not {turn - 1, turn} & set(range(start, end + 1)))
    answers[start : end + 1] = [BROKEN] * (end + 1 - start)
    line = Line(answers)
    span = first_differing(count, line)
    assert (span.same, span.differs) == (turn - 1, turn)
    assert len(line.asked) <= 2 * ceil(log2(count)) + 2


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(1, 20))
def test_ddmin_finds_the_one_set_that_matters(culprits: set[int], extra: int) -> None:
    changes = tuple(range(max(culprits) + extra))
    found = smallest(changes, lambda subset: DIFFERS if culprits <= set(subset) else SAME)
    assert set(found) == culprits
    assert found == tuple(sorted(found)), "in the order they were given"


@given(st.integers(1, 8), st.data())
def test_ddmin_is_1_minimal_whatever_the_test_says(count: int, data: st.DataObject) -> None:
    """Also where subsets cannot be tried, and where more changes than one set would do."""
    changes = tuple(range(count))
    table: dict[frozenset[int], Answer] = {}

    def answer(subset: tuple[int, ...]) -> Answer:
        key = frozenset(subset)
        assert key, "the empty set is the control"
        assert len(key) < count, "all of them are known to differ"
        assert key not in table, "asked twice"
        table[key] = data.draw(st.sampled_from(Answer))
        return table[key]

    found = smallest(changes, answer)
    assert found == changes or table[frozenset(found)] is DIFFERS
    for one in found if len(found) > 1 else ():
        assert table[frozenset(found) - {one}] is not DIFFERS


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ddmin_keeps_changes_that_only_work_together(count: int) -> None:
    changes = tuple(range(count))
    assert smallest(changes, lambda subset: BROKEN) == changes
