"""Verdicts on series of numbers alone: losses and gradient norms of runs, beside the noise of earlier runs of the job.

Weights, gradients and data of an imported series are not known, so that T0 to T2 say nothing and T3 is what is left: a
run is reduced to one number a measure, the mean over a window, because its steps are correlated and are no sample. Runs
of one seed on both sides are paired (`tiers.equivalence`). Other runs are two groups that scatter alike.

[Note: Noise band] Over the window's mean a fault of few steps is lost. So each number of a new run is also held to the
band of the earlier runs at that step, mean +- t sd sqrt(1 + 1/n), with t for all steps together (Bonferroni's) and the
margin beside it. Losses have longer tails than a normal distribution, and a spike may be one: outside of the band is a
doubt, no refutation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.config.errors import refuse
from harness.parity.outcome import Finding, Grade, Outcome, SeedVerdict, Stage, Verdict, percent
from harness.parity.tiers.equivalence import ALPHA, Decision, PairedTest, decided, paired_test, unpaired_test
from harness.store import provenance, status
from harness.store.metrics import read_columns
from harness.store.provenance import SERIES, WATCHED
from harness.store.rundir import RunDir, flatten
from harness.store.screen import counted
from harness.store.status import State

MEASURES = ("loss", "grad_norm")
NO_MARGIN = 1e-300
"""Margin where none is given: any difference matters, and no number of runs shows that there is none."""
FLAT = 1e-12
"""Relative scatter below which runs are equal but for the order of sums."""
FEWEST = 3
"""Earlier runs of which a band is made."""
NAMED = 3
AGREE = 10
"""Numbers that two series must have in common to be EQUIVALENT for agreeing in all of them."""


@dataclass(frozen=True)
class Series:
    path: Path
    name: str
    seed: int | None
    """None where the other program's is not known."""
    values: Mapping[str, Mapping[int, float]]
    """By measure and step; without gaps."""

    @classmethod
    def of(cls, path: Path) -> Series:
        """Raises `BadRequest`: the run has not ended, or has no loss. `StoreError`: it is no run, or damaged."""
        run = RunDir(path)
        config, state = flatten(run.config()), status.effective(path)
        if state is None or state.state is not State.done:
            raise refuse(
                run.name, f"is {'not started' if state is None else state.state.value}", fix="take runs that ended"
            )
        columns = read_columns(run.metrics, ("step", *MEASURES))
        values = {
            key: {at: float(each) for at, each in zip(columns["step"], columns[key], strict=True) if each is not None}
            for key in MEASURES
        }
        if not values["loss"]:
            raise refuse(run.name, "has no loss in any step")
        known = SERIES in (origin := provenance.read(path)) or WATCHED not in origin
        return cls(path, run.name, config.get("train.seed") if known else None, values)


def is_series(path: Path) -> bool:
    return path.is_dir() and SERIES in provenance.read(path)


@dataclass(frozen=True)
class Groups:
    new: Sequence[Series]
    old: Sequence[Series]
    window: int = 0
    """Last common steps that count; 0: their later half."""

    @cached_property
    def every(self) -> list[Series]:
        return [*self.new, *self.old]

    @cached_property
    def measures(self) -> list[str]:
        return [key for key in MEASURES if all(each.values[key] for each in self.every)]

    def steps(self, measure: str) -> list[int]:
        """Steps that all runs have, and at which all earlier ones have a finite number."""
        common = set.intersection(*(set(each.values[measure]) for each in self.every))
        return sorted(at for at in common if all(math.isfinite(each.values[measure][at]) for each in self.old))

    def last(self, measure: str) -> list[int]:
        steps = self.steps(measure)
        return steps[-(self.window or (len(steps) + 1) // 2) :]

    def broken(self) -> tuple[Series, str, int] | None:
        """First number of a new run that is none, where no earlier run has such a one."""
        found = (
            (at, each, key)
            for each in self.new for key in self.measures for at in self.steps(key)
            if not math.isfinite(each.values[key][at])
        )  # fmt: skip
        at, each, key = min(found, key=lambda item: item[0], default=(0, None, ""))
        return None if each is None else (each, key, at)

    def tests(self, margins: Mapping[str, float]) -> tuple[PairedTest, ...]:
        return tuple(self._test(key, margins.get(key, NO_MARGIN)) for key in self.measures)

    def _test(self, measure: str, margin: float) -> PairedTest:
        left, right = ([self._mean(each, measure) for each in group] for group in (self.new, self.old))
        base = 1.0 if measure == "grad_norm" else abs(math.fsum(right) / len(right)) or math.nan
        if self.paired:
            old = {each.seed: value for each, value in zip(self.old, right, strict=True)}
            apart = [(value - old[each.seed]) / base for each, value in zip(self.new, left, strict=True)]
            return paired_test(measure, apart, margin)
        return unpaired_test(measure, [each / base for each in left], [each / base for each in right], margin)

    def _mean(self, run: Series, measure: str) -> float:
        """Mean over the window: of the loss, or of the logarithm of the gradient's norm."""
        values = [run.values[measure][at] for at in self.last(measure)]
        if measure == "grad_norm":
            values = [math.log(value) if value > 0 else math.nan for value in values]
        return math.fsum(values) / len(values)

    @cached_property
    def paired(self) -> bool:
        """True if each new run has one earlier run of its seed."""
        seeds = [[each.seed for each in group] for group in (self.new, self.old)]
        once = all(None not in group and len(set(group)) == len(group) for group in seeds)
        return once and len(self.new) > 1 and set(seeds[0]) <= set(seeds[1])

    def outside(self, margins: Mapping[str, float]) -> tuple[Series, str, int, float, float, float] | None:
        """First number of a new run outside of the band: run, measure, step, number and the band's ends; or None.

        Args: margins: by measure; the band is wider by what does not matter.
        """
        import numpy as np
        from scipy.special import stdtrit

        if len(self.old) < FEWEST:
            return None
        count = sum(len(self.steps(key)) for key in self.measures) * len(self.new)
        times = float(stdtrit(len(self.old) - 1, 1 - ALPHA / (2 * count))) * math.sqrt(1 + 1 / len(self.old))
        found = []
        for key in self.measures:
            steps = self.steps(key)
            held = np.array([[each.values[key][at] for at in steps] for each in self.old])
            middle = held.mean(0)
            half = times * held.std(0, ddof=1) + margins.get(key, 0.0) * np.abs(middle)
            for each in self.new:
                off = np.abs(np.array([each.values[key][at] for at in steps]) - middle)
                for place in np.flatnonzero((off > half) & (half > 0))[:1]:
                    ends = float(middle[place] - half[place]), float(middle[place] + half[place])
                    found.append((each, key, steps[place], each.values[key][steps[place]], *ends))
        return min(found, key=lambda item: item[2], default=None)


def against_history(
    new: Sequence[Path], old: Sequence[Path], margins: Mapping[str, float] | None = None, window: int = 0
) -> SeedVerdict:
    """T3 of new runs against earlier ones of the same job, by their numbers alone.

    Args: margins: by measure: largest relative difference that does not matter; without one nothing is EQUIVALENT that
    differs. window: last steps that count; 0: the later half.

    Raises `BadRequest`: a run is on both sides, or has not ended; or too few steps are common. `StoreError`: one is no
    run.
    """
    paths = [[path.resolve() for path in group] for group in (new, old)]
    if both := set(paths[0]) & set(paths[1]):
        raise refuse(str(min(both)), "is on both sides", fix="name earlier runs behind --history, and new ones before")
    groups = Groups([Series.of(path) for path in paths[0]], [Series.of(path) for path in paths[1]], window)
    for measure in groups.measures:
        if len(groups.steps(measure)) < 2:
            problem = f"{counted(len(groups.steps(measure)), 'step')} of {measure} in common"
            raise refuse("--history", problem, fix="import series that were logged at the same steps")
    return _verdict(groups, margins or {})


def _verdict(groups: Groups, margins: Mapping[str, float]) -> SeedVerdict:
    tests = groups.tests(margins)
    decision = decided(tests)
    outcome, said = _outcome(groups, margins, decision)
    names = ", ".join(each.name for each in groups.new[:NAMED]) + ", ..." * (len(groups.new) > NAMED)
    sentence = f"{outcome.value}: {names} beside {counted(len(groups.old), 'earlier run')}: {said}."
    return SeedVerdict(
        outcome=outcome,
        sentence=sentence,
        arms=tuple(str(each.path) for each in groups.new),
        seeds=len(groups.new),
        seeds_needed=decision.seeds_needed if outcome is Outcome.UNDECIDED else None,
        p_equivalent=decision.p_equivalent,
        p_different=decision.p_different,
        tests=tuple(dict(vars(test)) for test in tests),
    )


def _outcome(groups: Groups, margins: Mapping[str, float], decision: Decision) -> tuple[Outcome, str]:
    if (broken := groups.broken()) is not None:
        run, key, step = broken
        return Outcome.DIFFERENT, f"at step {step}, {key} of {run.name} is {run.values[key][step]}, and never before"
    if len(groups.every) == 2:
        return _of_two(groups)
    told, flat = _told(groups, decision.tests), [each for each in decision.tests if each.sd < FLAT < abs(each.mean)]
    if any(each.measure not in margins for each in flat):
        why = "earlier runs have no noise at all, and nothing tells rounding from a fault"
        return Outcome.UNDECIDED, f"{told}; {why}: --margin {flat[0].measure}=SIZE says what does not matter"
    if decision.outcome is not Outcome.DIFFERENT and (found := groups.outside(margins)) is not None:
        run, key, step, value, low, high = found
        band = f"{key} of {run.name} is {value:.6g} where earlier runs lie within {low:.6g} to {high:.6g}"
        return Outcome.UNDECIDED, f"at step {step}, {band}; over the window {told}"
    if decision.outcome is Outcome.UNDECIDED:
        told += _needed(groups, margins, decision)
    return decision.outcome, told


def _of_two(groups: Groups) -> tuple[Outcome, str]:
    left, right = groups.new[0].values, groups.old[0].values
    common = [(key, at) for key in groups.measures for at in groups.steps(key)]
    apart = [(at, key) for key, at in common if left[key][at] != right[key][at]]
    if not apart:
        told = f"they agree in all of {counted(len(common), 'number')}, and nothing else of them is known"
        return (Outcome.EQUIVALENT if len(common) >= AGREE else Outcome.UNDECIDED), told
    step, measure = min(apart)
    told = f"at step {step}, {measure} is {left[measure][step]:.6g} and {right[measure][step]:.6g}"
    least = f"a single pair of series has no noise to hold that to; {FEWEST} earlier runs make a band"
    return Outcome.UNDECIDED, f"{told}; {least}, and say how many decide"


def _told(groups: Groups, tests: Sequence[PairedTest]) -> str:
    said = []
    for test in tests:
        window, steps = groups.last(test.measure), groups.steps(test.measure)
        where = f"mean over {len(window)} of {counted(len(steps), 'common step')}"
        noise = f"{percent(test.sd)} {'a pair' if groups.paired else 'a run'}"
        margin = f" where {percent(test.margin)} does not matter" if test.margin > NO_MARGIN else ""
        interval = f"90 % interval {percent(test.low)} to {percent(test.high)}"
        said.append(
            f"{test.measure} ({where}) is off by {percent(test.mean)} ({interval}){margin}, with a noise of {noise}"
        )
    return "; ".join(said) + ("; paired by seed" if groups.paired else "")


def _needed(groups: Groups, margins: Mapping[str, float], decision: Decision) -> str:
    if decision.seeds_needed is None:
        return "; no number of runs is known to decide it"
    each = "pairs of one seed" if groups.paired else "runs on each side"
    sure = "" if margins else ", if the difference is the one that was seen; --margin says what does not matter"
    return f"; {decision.seeds_needed} {each} would decide it{sure}"


def compare_series(arm: Path, control: Path) -> Verdict:
    """Verdict on two runs, one of which is a series alone. Raises `BadRequest`, `StoreError`: as `against_history`."""
    found = against_history([arm], [control])
    grades = {Outcome.EQUIVALENT: Grade.ok, Outcome.DIFFERENT: Grade.bad}
    grade = grades.get(found.outcome, Grade.doubt)
    row = Finding("T3", "series", Stage.trajectory, grade, "equal" if grade is Grade.ok else "other", "equal")
    failed = () if grade is Grade.ok else (row,)
    admits = "T3: numbers of steps alone, of which a single pair certifies little"
    return Verdict(found.outcome, found.sentence, str(arm), str(control), "T3", admits, (row,), failed)
