"""The global order: a permutation an epoch, a pure function of the position."""

from collections import Counter

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


@pytest.mark.parametrize("size", [10, 200])
def test_all_places_and_all_distances_are_equally_likely(size: int) -> None:
    """Chi-squared over 4,000 seeds of where sequence 0 goes, and how far from it sequence 1."""
    firsts = [(sequence_at(0, size, seed), sequence_at(1, size, seed)) for seed in range(4000)]
    places = Counter(first for first, _ in firsts)
    gaps = Counter((second - first) % size for first, second in firsts)
    for counts, cells in ((places, size), (gaps, size - 1)):
        expected = 4000 / cells
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values()) / (cells - 1)
        assert chi_squared < 2.2


def test_order_is_pinned() -> None:
    """A change here makes every old run incomparable to every new one."""
    assert [sequence_at(i, 10, 1234) for i in range(12)] == [1, 8, 6, 3, 0, 2, 5, 9, 7, 4, 4, 5]
