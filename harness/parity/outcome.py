"""Outcomes, findings and verdicts. Plain values, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

from harness.store.metrics import plain


class Outcome(Enum):
    EQUAL = "EQUAL"
    EQUIVALENT = "EQUIVALENT"
    DIFFERENT = "DIFFERENT"
    UNDECIDED = "UNDECIDED"
    NOT_COMPARABLE = "NOT_COMPARABLE"

    @property
    def exit_code(self) -> int:
        """0 EQUAL and EQUIVALENT, 1 DIFFERENT, 3 UNDECIDED, 4 NOT_COMPARABLE."""
        return {Outcome.DIFFERENT: 1, Outcome.UNDECIDED: 3, Outcome.NOT_COMPARABLE: 4}.get(self, 0)


SEVERITY = (Outcome.DIFFERENT, Outcome.NOT_COMPARABLE, Outcome.UNDECIDED, Outcome.EQUIVALENT, Outcome.EQUAL)
"""Outcome of a study: the first of these that any arm got."""


Grade = StrEnum("Grade", "ok doubt bad")
"""`ok` within the allowed bound, `doubt` beyond it, `bad` beyond explanation."""
Stage = StrEnum("Stage", "record data checkpoint weights gather forward gradient reduction clipping optimizer")

AHEAD = "as if one step had been taken before"
"""End of a note of a finding that explains itself."""


@dataclass(frozen=True)
class Finding:
    tier: str
    """T0, T1 or T2."""
    check: str
    stage: Stage
    grade: Grade
    observed: float | str
    allowed: float | str
    step: int | None = None
    tensor: str | None = None
    count: int = 1
    note: str = ""
    since: Stage | None = None
    """First possible stage of a difference at an uncaptured step; `stage` is the last. None if known to be `stage`."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        order = list(Stage)
        first = order.index(self.since or self.stage)
        return tuple(order[min(first, order.index(self.stage)) : order.index(self.stage) + 1])

    @property
    def explains_itself(self) -> bool:
        """True if its note names a cause that lasts over all steps."""
        return self.note.endswith(AHEAD)

    @property
    def place(self) -> str:
        if self.since is None or self.since is self.stage:
            return self.stage.value
        return f"between {self.since.value} and {self.stage.value}"

    @property
    def ratio(self) -> float:
        """Observed over allowed; infinite for facts and non-finite values."""
        if isinstance(self.observed, str) or isinstance(self.allowed, str):
            return 0.0 if self.grade is Grade.ok else math.inf
        if not math.isfinite(self.observed):
            return math.inf
        if self.allowed > 0:
            return self.observed / self.allowed
        return 0.0 if self.observed <= self.allowed else math.inf


def grade(observed: float, allowed: float, refuted: float) -> Grade:
    """`ok` up to `allowed`, `doubt` up to `refuted`, `bad` above; a value that is not a number is `bad`."""
    if observed <= allowed:
        return Grade.ok
    return Grade.doubt if observed <= refuted else Grade.bad


REFUTED = 2.0
"""Multiple of what is allowed beyond which rounding is refuted; between the two is doubt."""


def measured(
    check: str,
    stage: Stage,
    observed: float,
    allowed: float,
    refuted: float | None = None,
    *,
    step: int | None = None,
    tensor: str | None = None,
    note: str | Callable[[], str] = "",
    since: Stage | None = None,
    count: int = 1,
) -> Finding:
    """Finding of T2 by its grade. Args: refuted: `REFUTED` times `allowed` by default. note: told of failures alone."""
    verdict = grade(observed, allowed, REFUTED * allowed if refuted is None else refuted)
    said = "" if verdict is Grade.ok else note if isinstance(note, str) else note()
    return Finding("T2", check, stage, verdict, observed, allowed, step, tensor, count, said, since)


def fact(
    check: str,
    stage: Stage,
    observed: str,
    wanted: str = "equal",
    *,
    tier: str = "T1",
    wrong: Grade = Grade.bad,
    step: int | None = None,
    tensor: str | None = None,
    count: int = 1,
    note: str = "",
) -> Finding:
    """Finding of a fact: `ok` where it is as wanted, else `wrong`. Args: note: told of failures alone."""
    right = observed == wanted
    grade = Grade.ok if right else wrong
    return Finding(tier, check, stage, grade, observed, wanted, step, tensor, count, "" if right else note)


def percent(value: float | None) -> str:
    """A relative size for people: per cent down to 0.01 %, else a power of ten."""
    if value is None:
        return "unknown"
    return f"{100 * value:.3g} %" if 1e-4 <= abs(value) < 1e3 else f"{value:.1e}"


def worst(findings: Iterable[Finding]) -> Finding | None:
    order = [Grade.ok, Grade.doubt, Grade.bad]
    return max(findings, key=lambda found: (order.index(found.grade), found.ratio), default=None)


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str
    arm: str
    control: str
    tier: str
    admissible: str
    evidence: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    resolution: float | None = None
    """Smallest relative error in the scale of all gradients that this pair would have shown as DIFFERENT."""
    commands: tuple[str, ...] = ()
    """Next commands: the first shows the first bad tensor, or judges again."""
    script: str = ""
    """Command that makes both runs again and tells if the first finding lasts (`script.scripted`); may be empty."""

    @property
    def exit_code(self) -> int:
        return self.outcome.exit_code

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`, as in `harness.store.metrics.plain`."""
        return {**plain(asdict(self)), "exit_code": self.exit_code}


@dataclass(frozen=True)
class SeedVerdict:
    outcome: Outcome
    sentence: str
    arms: tuple[str, ...]
    seeds: int
    seeds_needed: int | None
    p_equivalent: float
    p_different: float
    tests: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class StudyVerdict:
    study: str
    question: str
    arms: tuple[Verdict, ...] = field(default=())
    seeds: tuple[SeedVerdict, ...] = field(default=())

    @property
    def outcome(self) -> Outcome:
        together = {path for each in self.seeds for path in each.arms}
        found = {arm.outcome for arm in self.arms if arm.outcome is not Outcome.UNDECIDED or arm.arm not in together}
        found |= {each.outcome for each in self.seeds}
        return next((outcome for outcome in SEVERITY if outcome in found), Outcome.NOT_COMPARABLE)

    @property
    def exit_code(self) -> int:
        return self.outcome.exit_code

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "question": self.question,
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "arms": [arm.as_json() for arm in self.arms],
            "seeds": [plain(asdict(each)) for each in self.seeds],
        }
