"""Grades of a whole series at once, with a Finding only for failures.

A series yields each failed step, up to `LISTED` of them; the worst of further ones, with their number; and the worst of
passed ones, with theirs. So a verdict's size is bounded, and still has the first, the worst and the count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.parity.outcome import Finding, Grade, Stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

LISTED = 50


@dataclass(frozen=True)
class Series:
    """One check at many steps.

    steps: counted from 1. observed, allowed, refuted: one a step, as in `outcome.grade`.
    """

    check: str
    stage: Stage
    steps: NDArray[np.int64]
    observed: Float64
    allowed: Float64
    refuted: Float64
    since: Stage | None = None
    note: str = ""
    tier: str = "T2"

    def finding(self, at: int, count: int = 1, tensor: str | None = None) -> Finding:
        grade = self.grade(at)
        return Finding(
            self.tier,
            self.check,
            self.stage,
            grade,
            float(self.observed[at]),
            float(self.allowed[at]),
            step=int(self.steps[at]),
            tensor=tensor,
            count=count,
            note="" if grade is Grade.ok else self.note,
            since=self.since,
        )

    def grade(self, at: int) -> Grade:
        if self.observed[at] <= self.allowed[at]:
            return Grade.ok
        return Grade.doubt if self.observed[at] <= self.refuted[at] else Grade.bad

    def every(self) -> list[Finding]:
        return [self.finding(at) for at in range(len(self.steps))]

    def findings(self, tensor: Callable[[int], str | None] = lambda at: None) -> list[Finding]:
        import numpy as np

        if not len(self.steps):
            return []
        failed = np.flatnonzero(~(self.observed <= self.allowed))
        passed = np.flatnonzero(self.observed <= self.allowed)
        listed, rest = failed[:LISTED], failed[LISTED:]
        found = [self.finding(int(at), tensor=tensor(int(at))) for at in listed]
        if rest.size:
            bad = rest[~(self.observed[rest] <= self.refuted[rest])]
            worst = int(self._farthest(bad if bad.size else rest))
            found.append(self.finding(worst, int(rest.size), tensor(worst)))
        if passed.size:
            worst = int(self._farthest(passed))
            found.append(self.finding(worst, int(passed.size), tensor(worst)))
        return found

    def _farthest(self, places: NDArray[np.int64]) -> int:
        import numpy as np

        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = self.observed[places] / self.allowed[places]
        return int(places[int(np.argmax(np.where(np.isnan(ratios), 0.0, ratios)))])


def listed(findings: Sequence[Finding]) -> int:
    return sum(finding.count for finding in findings)
