"""A pair judged: outcome, and stage of its first finding; rates with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.power.steps import Pair
from harness.parity.compare import compare
from harness.parity.outcome import Grade, Outcome

PASSES = (Outcome.EQUAL.value, Outcome.EQUIVALENT.value)


@dataclass(frozen=True)
class Judged:
    """A verdict on a pair.

    named: stage of the first finding; `stages` are all that it leaves open. stage: where the fault is, empty for a
    clean pair.
    """

    outcome: str
    step: int | None
    named: str
    stages: tuple[str, ...]
    stage: str
    sentence: str

    @property
    def caught(self) -> bool:
        return self.outcome not in PASSES

    @property
    def placed(self) -> bool:
        return self.caught and self.stage in self.stages


def judge_pair(pair: Pair, arm: Path, control: Path) -> Judged:
    """Raises `StoreError`: one of them is no run."""
    verdict = compare(arm, control)
    first = next((f for f in verdict.findings if f.grade is not Grade.ok), None)
    step, named = (None, "") if first is None else (first.step, first.stage.value)
    stages = () if first is None else tuple(stage.value for stage in first.stages)
    return Judged(verdict.outcome.value, step, named, stages, pair.stage, verdict.sentence)
