"""The global order: a permutation an epoch, a pure function of the position."""

import itertools

import pytest

from harness.data.order import sequence_at


def epoch(number: int, size: int, seed: int = 7) -> list[int]:
    return [sequence_at(number * size + i, size, seed) for i in range(size)]


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 1000])
def test_every_epoch_holds_every_sequence_once(size: int) -> None:
    for number in (0, 1, 9):
        assert sorted(epoch(number, size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch(0, 200), epoch(1, 200), epoch(0, 200, seed=8)]
    for i in range(3):
        for j in range(i):
            agreeing = sum(a == b for a, b in zip(orders[i], orders[j], strict=True))
            assert agreeing < 12, "two independent permutations agree in about one place"


def test_order_is_well_mixed() -> None:
    """Neighbours in the order are as far apart as random ones (a third of the range), and no sequence stays put."""
    order = epoch(0, 3000)
    mean_gap = sum(abs(a - b) for a, b in itertools.pairwise(order)) / len(order) / 3000
    assert 0.31 < mean_gap < 0.36
    assert sum(i == index for i, index in enumerate(order)) < 8


def test_order_is_pinned() -> None:
    """A change here makes every old run incomparable to every new one."""
    assert [sequence_at(i, 10, 1234) for i in range(12)] == [5, 4, 8, 2, 6, 0, 1, 7, 9, 3, 7, 8]
