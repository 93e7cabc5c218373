"""Where a difference comes from: the first of a line of versions that differs, the smallest set of changes that does.

Pure: both ask a test, which answers `same`, `differs` or `unresolved`, and never ask it twice about one thing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, log2
from typing import TypeVar


class Answer(Enum):
    same = "same"
    differs = "differs"
    unresolved = "unresolved"


@dataclass(frozen=True)
class Span:
    """Where a line of versions changes: the last that is the same and the first that differs, by position.

    Everything between the two could not be tried: the change lies in one of them, or in `differs`.
    """

    same: int
    differs: int


def first_differing(count: int, test: Callable[[int, int], Answer]) -> Span:
    """Find a position that differs and whose predecessor is the same, by halving.

    Where versions once different stay so, that is the first that differs, found in log2(count) trials. A line that
    turns more than once has several such places, and one of them is found. A position that cannot be tried splits what
    is left: its outer gaps are halved first, which finds both ends of a broken stretch in a few trials. Only a change
    inside the stretch makes us try all of it.

    Args:
        count: of versions, two or more; the first is the same, the last differs, and neither is tried.
        test: is given a position, and about how many trials are left with this one.
    """
    same, differs, broken = 0, count - 1, set[int]()
    while True:
        walls = sorted({same, differs, *(at for at in broken if same < at < differs)})
        gaps = list(itertools.pairwise(walls))
        open_gaps = [gap for gap in (gaps[0], gaps[-1]) if _width(gap) > 1] or gaps
        low, high = max(open_gaps, key=_width)
        if high - low < 2:
            return Span(same, differs)
        at = (low + high) // 2
        answer = test(at, ceil(log2(differs - same)))
        if answer is Answer.same:
            same = at
        elif answer is Answer.differs:
            differs = at
        else:
            broken.add(at)


def _width(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


Change = TypeVar("Change", bound=Hashable)


def smallest(changes: Sequence[Change], test: Callable[[tuple[Change, ...]], Answer]) -> tuple[Change, ...]:
    """A subset that differs, of which no single change can be left out: `ddmin`.

    A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on Software
    Engineering 28(2), 2002. Parts are tried first, then what is left without each part, then smaller parts. Subsets
    that cannot be tried count as not differing. Minimal in that sense (1-minimal), not the smallest of all.

    Args:
        changes: all of them, which together differ; neighbours are kept in one part as long as possible.
        test: is given a subset in their order; never the empty one, nor all.
    """
    answers: dict[tuple[Change, ...], Answer] = {tuple(changes): Answer.differs, (): Answer.same}

    def differs(subset: tuple[Change, ...]) -> bool:
        if subset not in answers:
            answers[subset] = test(subset)
        return answers[subset] is Answer.differs

    left, parts = tuple(changes), 2
    while len(left) > 1:
        pieces = _cut(left, parts)
        rests = [tuple(each for each in left if each not in set(piece)) for piece in pieces]
        if (piece := next(filter(differs, pieces), None)) is not None:
            left, parts = piece, 2
        elif (rest := next(filter(differs, rests), None)) is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts < len(left):
            parts = min(2 * parts, len(left))
        else:
            break
    return left


def _cut(items: tuple[Change, ...], parts: int) -> list[tuple[Change, ...]]:
    edges = [len(items) * number // parts for number in range(parts + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]
