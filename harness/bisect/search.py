"""Search for the first version that differs, and for the smallest set of changes that does.

Pure: tests return `same`, `differs` or `unresolved`, and are called once per candidate.
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
    """Location of a change: positions of the last version that is the same and the first that differs.

    Versions between the two could not be tried; the change lies in one of them, or in `differs`.
    """

    same: int
    differs: int


def first_differing(count: int, test: Callable[[int, int], Answer]) -> Span:
    """Position that differs, with a predecessor that is the same, by halving.

    If versions stay different, that is the first to differ, in log2(count) trials; otherwise one of several. An
    untestable position splits the rest, and its outer gaps are halved first, which finds both ends of a broken stretch
    early.

    Args: count: of versions, at least 2; neither the first (same) nor the last (differs) is tried. test: takes a
    position and the approximate number of remaining trials.
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
    """1-minimal subset that differs (`ddmin`): without any single change it does not.

    A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on Software
    Engineering 28(2), 2002. Parts come first, then complements, then smaller parts. Unresolved subsets count as the
    same.

    Args: changes: together they differ; neighbours stay in one part as long as possible. test: takes a subset in their
    order, never empty nor all.
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
