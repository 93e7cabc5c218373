"""Request and verdict of one trial, for comparing versions and for the search."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum

from harness.bisect.snapshot import check_words
from harness.config.doc import settings
from harness.config.errors import refuse
from harness.parity import Grade, Outcome, Stage, Verdict
from harness.parity.telling.wording import describe
from harness.parity.tiers.comparable import REPEATABLE
from harness.store import commands


class Answer(Enum):
    """Word of `git bisect` for a version."""

    same = "good"
    differs = "bad"
    unresolved = "skip"


PASSED = (Outcome.EQUAL, Outcome.EQUIVALENT)


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
