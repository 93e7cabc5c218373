"""Grades of a whole series at once: a check that is made at every step of a run of 100,000 is one array, and a Finding
only where it did not pass.

What is said of a series: each step that did not pass, in order, up to `LISTED` of them; the worst of all further ones,
standing for them; and the worst of those that passed, standing for these. So a verdict's size does not grow with the
run, and nothing that a reader looks for (the first step, the worst one, how many) is lost.
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
        """As `outcome.grade`; a value that is not a number is `bad`."""
        if self.observed[at] <= self.allowed[at]:
            return Grade.ok
        return Grade.doubt if self.observed[at] <= self.refuted[at] else Grade.bad

    def every(self) -> list[Finding]:
        return [self.finding(at) for at in range(len(self.steps))]

    def findings(self, tensor: Callable[[int], str | None] = lambda at: None) -> list[Finding]:
        """Findings of the series; `tensor` names the one that the step at a place is about."""
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
            ratios = np.nan_to_num(self.observed[places] / self.allowed[places], nan=0.0, posinf=np.inf)
        return int(places[int(np.argmax(ratios))])


def listed(findings: Sequence[Finding]) -> int:
    return sum(finding.count for finding in findings)
