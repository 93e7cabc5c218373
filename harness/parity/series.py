"""Verdicts on series of numbers alone: losses and gradient norms of runs, beside the noise of earlier runs of the job.

docs/verdicts.md ("T3: paired seeds") says how groups of runs are compared, and what band single numbers are held to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config.errors import refuse
from harness.parity.outcome import Outcome, SeedVerdict, percent
from harness.parity.tensors import Float64
from harness.parity.tiers.equivalence import ALPHA, PairedTest, decided, unpaired_test
from harness.store import status
from harness.store.metrics import read_columns
from harness.store.rundir import RunDir
from harness.store.screen import counted
from harness.store.status import State

MEASURES = ("loss", "grad_norm")
NO_MARGIN = 1e-300
"""Margin where none is given: any difference matters, and no number of runs shows that there is none."""
FLAT = 1e-12
"""Relative scatter below which runs are equal but for the order of sums."""
FEWEST = 3
"""Earlier runs of which a band is made."""


@dataclass(frozen=True)
class Series:
    path: Path
    name: str
    values: Mapping[str, Mapping[int, float]]
    """By measure and step; without gaps."""

    @classmethod
    def of(cls, path: Path) -> Series:
        """Raises `BadRequest`: the run has not ended, or has no loss. `StoreError`: it is no run, or damaged."""
        run, state = RunDir(path), status.effective(path)
        if state is None or state.state is not State.done:
            raise refuse(run.name, "has not ended", fix="name runs that are done")
        columns = read_columns(run.metrics, ("step", *MEASURES))
        pairs = {key: zip(columns["step"], columns[key], strict=True) for key in MEASURES}
        values = {key: {at: float(each) for at, each in of if each is not None} for key, of in pairs.items()}
        if not values["loss"]:
            raise refuse(run.name, "has no loss in any step")
        return cls(path, run.name, values)


@dataclass(frozen=True)
class Measure:
    """A measure at the steps that all runs have, and at which all earlier ones have a finite number."""

    name: str
    steps: NDArray[np.int64]
    new: Float64
    """[runs, steps]"""
    old: Float64
    margin: float | None
    window: int
    """Last steps that count."""

    @classmethod
    def of(cls, name: str, new: Sequence[Series], old: Sequence[Series], margin: float | None, window: int) -> Measure:
        """Raises `BadRequest`: fewer than two steps are common."""
        steps = np.array(sorted(set.intersection(*(set(each.values[name]) for each in (*new, *old)))), dtype=np.int64)
        left, right = (np.array([[each.values[name][at] for at in steps] for each in runs]) for runs in (new, old))
        finite = np.isfinite(right).all(0)
        if finite.sum() < 2:
            problem = f"has {counted(int(finite.sum()), 'step')} of {name} in common with the new runs"
            raise refuse("--history", problem, fix="import series that were logged at the same steps")
        count = window or (int(finite.sum()) + 1) // 2
        return cls(name, steps[finite], left[:, finite], right[:, finite], margin, count)

    def test(self) -> PairedTest:
        """Test of the means over the window, relative to the earlier runs'; of a norm's logarithm."""
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log if self.name == "grad_norm" else np.asarray
            left, right = (log(runs)[:, -self.window :].mean(1) for runs in (self.new, self.old))
            base = 1.0 if self.name == "grad_norm" else abs(right.mean())
        groups = (left / base).tolist(), (right / base).tolist()
        return unpaired_test(self.name, *groups, self.margin or NO_MARGIN)

    def first(self, wrong: NDArray[np.bool_]) -> tuple[int, int] | None:
        """Place of the first step, and of a run, where a table is true."""
        places = np.argwhere(wrong.T)
        return (int(places[0][0]), int(places[0][1])) if len(places) else None

    def band(self, tests: int) -> tuple[Float64, Float64]:
        """Ends of the band at each step. Args: tests: numbers that are held to a band, of all measures."""
        from scipy.special import stdtrit

        n, middle = len(self.old), self.old.mean(0)
        times = float(stdtrit(n - 1, 1 - ALPHA / (2 * tests))) * math.sqrt(1 + 1 / n)
        half = times * self.old.std(0, ddof=1) + (self.margin or 0.0) * abs(middle)
        return middle - half, middle + half


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
    left, right = ([Series.of(path) for path in group] for group in paths)
    return judge_series(left, right, margins or {}, window)


def judge_series(
    new: Sequence[Series], old: Sequence[Series], margins: Mapping[str, float], window: int = 0
) -> SeedVerdict:
    keys = [key for key in MEASURES if all(each.values[key] for each in (*new, *old))]
    measures = [Measure.of(key, new, old, margins.get(key), window) for key in keys]
    tests = tuple(each.test() for each in measures)
    found = decided(tests)
    sentence = "; ".join(map(_sentence, measures, tests))
    outcome, needed = found.outcome, found.seeds_needed
    clear = _without_tests(measures, tests, new, outcome)
    if clear is not None:
        outcome, needed = clear[0], None
        sentence = f"{clear[1]}; over the window, {sentence}"
    elif outcome is Outcome.UNDECIDED:
        many = "no number of runs is known to" if needed is None else f"{needed} runs on each side would"
        sure = "" if margins else " if the difference is what was seen; --margin says what does not matter"
        sentence = f"{sentence}; {many} decide it{sure}"
    names = ", ".join(each.name for each in new[:3]) + ", ..." * (len(new) > 3)
    sentence = f"{outcome.value}: {names} beside {counted(len(old), 'earlier run')}: {sentence}."
    arms = tuple(str(each.path) for each in new)
    return replace(found, outcome=outcome, sentence=sentence, arms=arms, seeds=len(new), seeds_needed=needed)


def _without_tests(
    measures: Sequence[Measure], tests: Sequence[PairedTest], new: Sequence[Series], outcome: Outcome
) -> tuple[Outcome, str] | None:
    """Outcome that the means do not decide, with its reason; None if they do."""
    for each in measures:
        if (place := each.first(~np.isfinite(each.new))) is not None:
            step, run = place
            value = f"{each.name} of {new[run].name} is {each.new[run, step]}"
            return Outcome.DIFFERENT, f"at step {each.steps[step]}, {value}, and of no earlier run"
    for each, test in zip(measures, tests, strict=True):
        if test.sd < FLAT < abs(test.mean) and each.margin is None:
            why = "there is no noise at all, and nothing tells rounding from a fault"
            return Outcome.UNDECIDED, f"{why}: --margin {each.name}=SIZE says what does not matter"
    count = sum(each.new.size for each in measures)
    for each in measures if outcome is not Outcome.DIFFERENT and len(measures[0].old) >= FEWEST else ():
        low, high = each.band(count)
        if (place := each.first((high > low) & ((each.new < low) | (each.new > high)))) is not None:
            step, run = place
            value = f"{each.name} of {new[run].name} is {each.new[run, step]:.6g}"
            band = f"where earlier runs lie within {low[step]:.6g} to {high[step]:.6g}"
            return Outcome.UNDECIDED, f"at step {each.steps[step]}, {value} {band}"
    return None


def _sentence(of: Measure, test: PairedTest) -> str:
    where = f"mean over {min(of.window, len(of.steps))} of {counted(len(of.steps), 'common step')}"
    if not test.df:
        return f"{of.name} ({where}) is off by {percent(test.mean)}, and a single pair has no noise to hold that to"
    interval = f"90 % interval {percent(test.low)} to {percent(test.high)})"
    interval += "" if of.margin is None else f" where {percent(of.margin)} does not matter"
    return f"{of.name} ({where}) is off by {percent(test.mean)} ({interval}, with a noise of {percent(test.sd)} a run"
