"""Request and verdict of one trial, for comparing versions and both searches."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, log2
from pathlib import Path
from typing import TypeVar

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from harness.bisect.snapshot import check_words
from harness.config.compose import compose
from harness.config.disk import Kept, kept
from harness.config.doc import settings
from harness.config.errors import BadRequest, refuse
from harness.launch.room import require
from harness.parity import Grade, Outcome, Stage, Verdict
from harness.parity.telling.wording import describe
from harness.parity.tiers.admissible import REPEATABLE
from harness.store import commands


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


PASSED = (Outcome.EQUAL, Outcome.EQUIVALENT)
ROOM = "--root A_FOLDER_WITH_ROOM, ckpt=none, or a smaller measure.capture_limit_mib"


@functools.cache
def _kept(words: tuple[str, ...]) -> Kept | None:
    try:
        return kept(compose((*words, "launch.dry_run=true")).typed)
    except (BadRequest, HydraException, OmegaConfBaseException):
        return None


@dataclass(frozen=True)
class Request:
    """Overrides of every trial, its store, and the criterion of a difference.

    bitwise: any unequal bit. undecided: doubtful verdicts count.
    """

    words: tuple[str, ...] = ()
    root: str = "runs"
    bitwise: bool = False
    undecided: bool = False

    def check(self) -> None:
        """Raises `BadRequest`: a setting is not the request's to choose, or bits are demanded where sums have no
        order."""
        check_words(self.words)
        modes = [word.partition("=")[2] for word in self.words if word.startswith(("numerics=", "numerics.mode="))]
        if self.bitwise and not set(modes) & set(REPEATABLE):
            problem = "demands bits, and numerics=fast promises no order of sums: two runs of one code may differ"
            raise refuse("--bitwise", problem, choices=f"with numerics={' or numerics='.join(REPEATABLE)}")

    def check_room(self, count: int, folder: Path) -> None:
        """Raises `NoRoom`: `count` new runs under `folder` do not fit the disk.

        Sizes follow this code's schema; requests of other versions are checked run by run.
        """
        one = _kept(self.words) if count else None
        if one is not None:
            need = Kept(count * one.checkpoints, count * one.captures)
            what = f"what would be trained ({count} run{'s' * (count > 1)})"
            require(folder, need, what, subject=f"--root {self.root}", fix=ROOM)

    def command(self, *before: str) -> str:
        flags = ["--bitwise"] * self.bitwise + ["--undecided"] * (self.undecided and before[0] == "bisect")
        return commands.verb(shlex.join([*before, *self.words, *flags]), self.root)


def unfit(verdict: Verdict) -> str:
    if verdict.outcome is not Outcome.NOT_COMPARABLE:
        return ""
    known = settings()
    strange = [f for f in verdict.findings if f.stage is Stage.record and f.check not in known]
    return verdict.sentence if strange else ""


def brief(verdict: Verdict) -> str:
    if verdict.outcome in PASSED:
        return verdict.outcome.value
    grave = Grade.bad if verdict.outcome is Outcome.DIFFERENT else Grade.doubt
    first = next((finding for finding in verdict.findings if finding.grade is grave), None)
    return verdict.sentence if first is None else f"{verdict.outcome.value}: {describe(first, first, first.note)}"


def answer_of(verdict: Verdict, sought: Outcome, *, undecided: bool = False) -> Answer:
    """Verdict as an answer to a search.

    DIFFERENT differs, EQUAL and EQUIVALENT are the same, UNDECIDED is neither (or differs, if `undecided`).
    NOT_COMPARABLE differs only if `sought` (the outcome at the bad end) is the same; elsewhere it is unresolved.
    """
    if verdict.outcome in PASSED:
        return Answer.same
    if verdict.outcome is Outcome.DIFFERENT or (undecided and verdict.outcome is Outcome.UNDECIDED):
        return Answer.differs
    if verdict.outcome is Outcome.NOT_COMPARABLE and verdict.outcome is sought and not unfit(verdict):
        return Answer.differs
    return Answer.unresolved


def check_ends(verdict: Verdict, good: str, bad: str, *, undecided: bool = False) -> None:
    """Raises `BadRequest`, with the verdict's sentence: the ends do not differ."""
    if why := unfit(verdict):
        raise refuse(bad, f"cannot be held against {good}: {why}", fix="both ends must run to their end on one machine")
    if answer_of(verdict, verdict.outcome, undecided=undecided) is not Answer.differs:
        fix = "a longer run, another seed, or --bitwise with numerics=deterministic may tell them apart"
        if verdict.outcome is Outcome.UNDECIDED:
            fix = "--undecided takes what is in doubt for a difference"
        raise refuse(bad, f"does not differ from {good}, so there is nothing to find. {verdict.sentence}", fix=fix)
