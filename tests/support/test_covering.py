"""A covering set holds every pair, and is small."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from tests.support.covering import BATCH, Cover, covering


def pairs(points: list[tuple[int, ...]]) -> set[object]:
    return {pair for point in points for pair in itertools.combinations(enumerate(point), 2)}


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(sizes, st.randoms(use_true_random=False))
def test_every_pair_of_any_product_is_held(sizes: list[int], chance: object) -> None:
    """Of a product with holes, too."""
    points = [p for p in itertools.product(*map(range, sizes)) if chance.random() < 0.8]
    few = [points[place] for place in covering(points)]
    assert pairs(few) == pairs(points)
    assert len(set(few)) == len(few)


def test_what_is_not_covering_is_marked_full_and_run_apart() -> None:
    cases = Cover(itertools.product("ab", (1, 2, 3), (True, False)), key=lambda case: case[1])
    assert list(cases) == list(itertools.product("ab", (1, 2, 3), (True, False)))
    marked = {each.id: [mark.name for mark in each.marks] for each in cases.params()}
    assert {name for name, marks in marked.items() if not marks} == {str(case) for case in cases.few}
    assert {name for name, marks in marked.items() if marks == ["full"]} == {
        str(c) for c in set(cases) - set(cases.few)
    }
    batches = {cases.batch(case) for case in cases}
    assert sorted(itertools.chain(*batches)) == sorted(cases)
    assert all(len({case[1] for case in batch}) == len({case in cases.few for case in batch}) == 1 for batch in batches)


def test_a_visit_is_never_longer_than_a_batch() -> None:
    cases = Cover(itertools.product(range(5 * BATCH), (1, 2)), key=lambda case: case[1])
    batches = {cases.batch(case) for case in cases}
    assert max(map(len, batches)) == BATCH
    assert sorted(itertools.chain(*batches)) == sorted(cases)
