"""Few cases of a product that still hold every pair of its values; the whole product is for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar, cast

import pytest

Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")
BATCH = 32
"""Cases of one visit, at most: a visit has to end within one test's limit of time."""
Held = tuple[tuple[int, Hashable], ...]


def covering(points: Iterable[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Places of few points that hold every combination of `strength` values which any of the points holds.

    Points have one value for each factor. Where factors depend on one another, leave out the points that cannot be.
    Greedy, and the same for the same points: each point taken is the first that holds most of what is still missing.
    """
    held = [_combinations(point, strength) for point in points]
    missing: set[Held] = set().union(*held)
    taken: list[int] = []
    while missing:
        best = max(range(len(held)), key=lambda place: len(held[place] & missing))
        missing -= held[best]
        taken.append(best)
    return sorted(taken)


def _combinations(point: Sequence[Hashable], strength: int) -> set[Held]:
    return set(itertools.combinations(enumerate(point), strength))


class Cover(list[Case]):
    """The cases of a product, the covering ones among them, and who is run together with whom.

    As a list it is all cases. `params` are the same for `pytest.mark.parametrize`: those that the covering part does
    not have are marked `full`. `batch` is what one visit of the ranks runs: cases of one key, of the covering part or
    of the rest, so that `make test` does not run for one case what only `make test-all` asks for; at most `BATCH`.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        values: Callable[[Case], Sequence[Hashable]] = lambda case: case,
        key: Callable[[Case], Hashable] = lambda case: None,
        strength: int = 2,
    ) -> None:
        super().__init__(dict.fromkeys(cases))
        self._key = key
        self.few = [self[place] for place in covering([values(case) for case in self], strength)]
        self._few = set(self.few)

    def params(self, name: Callable[[Case], str] = str) -> list[Any]:
        """All cases as parameters, named."""
        marks = {True: (), False: pytest.mark.full}
        return [pytest.param(case, marks=marks[case in self._few], id=name(case)) for case in self]

    def batch(self, case: Case) -> tuple[Case, ...]:
        """The cases to run in one go with this one, itself included."""
        alike = [
            other
            for other in self
            if (other in self._few) == (case in self._few) and self._key(other) == self._key(case)
        ]
        begin = alike.index(case) // BATCH * BATCH
        return tuple(alike[begin : begin + BATCH])


def once(function: Callable[..., Result]) -> Callable[..., Result]:
    """`functools.cache` that remembers what was raised, too: cases of a visit that failed do not make it again."""

    @cache
    def outcome(*args: Hashable, **named: Hashable) -> tuple[Result | None, Exception | None]:
        try:
            return function(*args, **named), None
        except Exception as error:
            return None, error

    @wraps(function)
    def remembered(*args: Hashable, **named: Hashable) -> Result:
        result, error = outcome(*args, **named)
        if error is not None:
            raise error
        return cast(Result, result)

    return remembered
