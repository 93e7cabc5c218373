"""What the comparator's verdicts are worth: faults found and missed, stages named rightly, false alarms, with bounds;
and what the rules that others publish say of the same pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.power.published import RULES
from benchmarks.power.published import judge as published
from harness.parity.compare import judge
from harness.parity.outcome import Grade, Outcome
from harness.parity.record import load
from harness.store.provenance import sources_digest

PASSES = (Outcome.EQUAL, Outcome.EQUIVALENT)


@dataclass(frozen=True)
class Judged:
    """One pair, judged. For a clean pair `fault` names what differs and `stage` is empty."""

    kind: str
    fault: str
    strength: str
    against: str
    held_out: bool
    outcome: str
    tier: str
    step: int | None
    """At which the first finding acted."""
    named: str
    """Stage of the first finding."""
    stage: str
    """Stage where the fault is."""
    sentence: str
    published: dict[str, bool]
    """Whether each published rule passes the pair."""
    unwitnessed: str = ""
    """The outcome where neither run says anything of itself, as engines without witnesses cannot."""
    stages: tuple[str, ...] = ()
    """Every stage that the first finding leaves open; `named` is the last of them."""

    @property
    def caught(self) -> bool:
        """Whether the verdict did not pass the pair."""
        return self.outcome not in {outcome.value for outcome in PASSES}

    @property
    def placed(self) -> bool:
        """Whether the fault was caught, and its stage is the one that is named, or lies in the interval that is."""
        return self.caught and self.stage in (self.stages or (self.named,))


def judge_pair(
    arm: Path, control: Path, *, kind: str, fault: str, strength: str, against: str, held_out: bool, stage: str
) -> Judged:
    """Judge two runs by our comparator and by the published rules.

    Raises:
        StoreError: one of them is no run.
    """
    left, right = (load(path, sources_digest()) for path in (arm, control))
    verdict, blind = judge(left, right), judge(left.unwitnessed(), right.unwitnessed())
    first = next((f for f in verdict.findings if f.grade is not Grade.ok), None)
    losses = [run.series("loss") for run in (left, right)]
    return Judged(
        kind=kind,
        fault=fault,
        strength=strength,
        against=against,
        held_out=held_out,
        outcome=verdict.outcome.value,
        tier=verdict.tier,
        step=None if first is None else first.step,
        named="" if first is None else first.stage.value,
        stage=stage,
        sentence=verdict.sentence,
        published=_published(losses),
        unwitnessed=blind.outcome.value,
        stages=() if first is None else tuple(stage.value for stage in first.stages),
    )


def _published(losses: Sequence[Sequence[float | None]]) -> dict[str, bool]:
    arm, control = ([float("nan") if value is None else value for value in series] for series in losses)
    if len(arm) != len(control) or not arm:
        return {rule.name: False for rule in RULES}
    return published(arm, control)


@dataclass(frozen=True)
class Rate:
    """A count out of a number of trials, with one-sided 95 % bounds of the true share."""

    hits: int
    of: int

    @property
    def share(self) -> float:
        """Hits over trials; NaN where there was no trial."""
        return self.hits / self.of if self.of else float("nan")

    @property
    def at_most(self) -> float:
        """Upper one-sided 95 % bound (Clopper and Pearson 1934)."""
        from scipy.special import betaincinv

        return 1.0 if self.hits >= self.of else float(betaincinv(self.hits + 1, self.of - self.hits, 0.95))

    @property
    def at_least(self) -> float:
        """Lower one-sided 95 % bound."""
        from scipy.special import betaincinv

        return 0.0 if not self.hits else float(betaincinv(self.hits, self.of - self.hits + 1, 0.05))


def caught(judged: Iterable[Judged]) -> Rate:
    """Faulty pairs that did not pass."""
    found = [each.caught for each in judged if each.kind == "faulty"]
    return Rate(sum(found), len(found))


def caught_unwitnessed(judged: Iterable[Judged]) -> Rate:
    """Faulty pairs that did not pass where neither run says anything of itself."""
    found = [each.unwitnessed not in {outcome.value for outcome in PASSES} for each in judged if each.kind == "faulty"]
    return Rate(sum(found), len(found))


def placed(judged: Iterable[Judged]) -> Rate:
    """Faulty pairs whose stage was named rightly, among those that were caught."""
    found = [each.placed for each in judged if each.kind == "faulty" and each.caught]
    return Rate(sum(found), len(found))


def false_alarms(judged: Iterable[Judged]) -> Rate:
    """Clean pairs that did not pass."""
    found = [each.caught for each in judged if each.kind == "clean"]
    return Rate(sum(found), len(found))


def published_rates(judged: Iterable[Judged], kind: str) -> dict[str, Rate]:
    """Pairs of one kind that each published rule did not pass, by the rule's name."""
    pairs = [each for each in judged if each.kind == kind]
    return {rule.name: Rate(sum(not each.published[rule.name] for each in pairs), len(pairs)) for rule in RULES}


def as_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(each) for each in judged]
