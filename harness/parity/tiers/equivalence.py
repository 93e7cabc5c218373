"""T3: equivalence over paired seeds, for differences that single runs cannot tell from chaos.

A *pair* is two runs of one seed, the arm's and the control's: initial weights and order of data vary with the seed,
together, and are the same in both. The steps of a run are correlated and are no sample, so a pair is reduced to one
number a measure, over the run's later half or as many last steps as the study says:

    loss        mean of (arm - control), over the control's mean: a relative difference
    grad_norm   mean of log(arm / control)

docs/verdicts.md ("T3: paired seeds") says what is tested, how p-values are adjusted, and what seeds are planned for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.parity.outcome import Outcome, SeedVerdict, percent
from harness.parity.record import Record
from harness.store.identity import EXCLUDED

ALPHA = 0.05
POWER = 0.9
SD_CONFIDENCE = 0.8
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class PairedTest:
    """Differences of one measure of one arm, in units of the margin: of pairs, or of two groups (`unpaired_test`).

    `low`, `high`: the 1 - 2 alpha interval of the mean, uncorrected; nan with fewer than two pairs.
    """

    measure: str
    margin: float
    pairs: int
    mean: float
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p_equivalent: float = 1.0
    """p-value of |mean| >= margin, by TOST; small: equivalent."""
    p_different: float = 1.0
    """p-value of |mean| <= margin; small: different."""
    groups: int = 1
    """1: differences of pairs. 2: of two groups' means; `sd` is that of one run, `pairs` the smaller group."""
    df: int = 0
    """Degrees of freedom of `sd`."""


def decide(arms: Mapping[str, Mapping[str, Sequence[float]]], margins: Mapping[str, float]) -> dict[str, SeedVerdict]:
    """Verdicts on all arms, as `decided`.

    Args: arms: by arm, by measure: one difference a pair. margins: by measure: largest irrelevant difference of the
    mean, above 0.

    Raises `ValueError`: a margin is not positive, or an arm lacks a measure that has one.
    """
    tests = {
        name: tuple(paired_test(m, differences[m], margins[m]) for m in margins) for name, differences in arms.items()
    }
    equivalent = holm({name: max(each.p_equivalent for each in found) for name, found in tests.items()})
    different = holm({name: _bonferroni([each.p_different for each in found]) for name, found in tests.items()})
    return {
        name: _decision(found, equivalent[name], different[name], ALPHA / len(arms)) for name, found in tests.items()
    }


def decided(tests: tuple[PairedTest, ...]) -> SeedVerdict:
    """Verdict on one arm by its measures; its sentence is the clause about them, and it names no arms."""
    return _decision(tests, max(t.p_equivalent for t in tests), _bonferroni([t.p_different for t in tests]), ALPHA)


def _decision(tests: tuple[PairedTest, ...], p_equivalent: float, p_different: float, level: float) -> SeedVerdict:
    outcome = Outcome.UNDECIDED
    if p_different <= ALPHA:
        outcome = Outcome.DIFFERENT
    elif p_equivalent <= ALPHA:
        outcome = Outcome.EQUIVALENT
    needed = seeds_needed(tests, level) if outcome is Outcome.UNDECIDED else None
    said = [
        f"{test.measure} is off by {percent(test.mean)} (90 % interval {percent(test.low)} to {percent(test.high)}) "
        f"where {percent(test.margin)} does not matter"
        for test in tests
    ]
    if outcome is Outcome.UNDECIDED:
        many = "no number of seeds is known to" if needed is None else f"{needed} seeds would"
        said.append(f"{many} decide it")
    plain = tuple(dict(vars(test)) for test in tests)
    return SeedVerdict(outcome, "; ".join(said), (), tests[0].pairs, needed, p_equivalent, p_different, plain)


def paired_test(measure: str, differences: Sequence[float], margin: float) -> PairedTest:
    """p-values are 1 for fewer than two pairs. Raises `ValueError`: the margin is not positive."""
    if not margin > 0:
        raise ValueError(f"the margin of {measure} is {margin}, and must be above 0")
    n = len(differences)
    mean = math.fsum(differences) / n if n else math.nan
    if n < 2 or not math.isfinite(mean):
        return PairedTest(measure, margin, n, mean)
    sd = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    return _tested(PairedTest(measure, margin, n, mean, sd, df=n - 1), sd / math.sqrt(n))


def unpaired_test(measure: str, arm: Sequence[float], control: Sequence[float], margin: float) -> PairedTest:
    """Difference of the means of two groups of runs that scatter alike (Student's); one group may be a single run.

    p-values are 1 for fewer than three runs.
    """
    df, count = len(arm) + len(control) - 2, min(len(arm), len(control))
    means = [math.fsum(group) / len(group) for group in (arm, control)]
    apart = means[0] - means[1]
    found = PairedTest(measure, margin, count, apart, groups=2, df=df)
    if df < 1 or not math.isfinite(apart):
        return found
    squares = [(value - mean) ** 2 for group, mean in zip((arm, control), means, strict=True) for value in group]
    sd = math.sqrt(math.fsum(squares) / df)
    return _tested(replace(found, sd=sd), sd * math.sqrt(1 / len(arm) + 1 / len(control)))


def _tested(found: PairedTest, error: float) -> PairedTest:
    """Interval and p-values. Args: error: standard error of the mean."""
    from scipy.special import stdtr, stdtrit

    mean, margin, df = found.mean, found.margin, found.df
    half = error * float(stdtrit(df, 1.0 - ALPHA))
    inside, outside = _t(margin - abs(mean), error), _t(abs(mean) - margin, error)
    p_equivalent = float(stdtr(df, -inside))
    p_different = min(1.0, float(stdtr(df, -outside)) + float(stdtr(df, -_t(abs(mean) + margin, error))))
    return replace(found, low=mean - half, high=mean + half, p_equivalent=p_equivalent, p_different=p_different)


def _t(distance: float, error: float) -> float:
    return distance / error if error else math.copysign(math.inf, distance)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted by Holm's step-down rule (1979): reject where at most alpha."""
    adjusted: dict[str, float] = {}
    so_far = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        so_far = max(so_far, min(1.0, (len(p_values) - place) * p))
        adjusted[name] = so_far
    return adjusted


def _bonferroni(p_values: Sequence[float]) -> float:
    return min(1.0, len(p_values) * min(p_values))


def seeds_needed(tests: Sequence[PairedTest], level: float) -> int | None:
    """Pairs, or runs in each group, that would decide every measure with `POWER`.

    Args: tests: of one arm. level: of each one-sided test.
    """
    found = [n for each in tests if (n := _needed(each, level)) is not None]
    return max(found, default=None) if len(found) == len(tests) else None


def _needed(found: PairedTest, level: float) -> int | None:
    from scipy.special import chdtri

    if found.df < 1 or not math.isfinite(found.sd):
        return None
    sd = found.sd * math.sqrt(found.df / float(chdtri(found.df, SD_CONFIDENCE)))
    low, high = found.pairs, found.pairs + 1
    while _power(found, sd, high, level) < POWER:
        low, high = high, 2 * high
        if high > 2 * MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(found, sd, middle, level) >= POWER else (middle, high)
    return high if high <= MOST_SEEDS else None


def _power(found: PairedTest, sd: float, n: int, level: float) -> float:
    from scipy.special import nctdtr, stdtrit

    error, df, mean = sd * math.sqrt(found.groups / n), found.groups * (n - 1), abs(found.mean)
    critical = float(stdtrit(df, 1.0 - level))
    if not error:
        return 1.0
    if mean >= found.margin:
        return 1.0 - float(nctdtr(df, (mean - found.margin) / error, critical))
    above = float(nctdtr(df, (mean - found.margin) / error, -critical))
    below = 1.0 - float(nctdtr(df, (mean + found.margin) / error, critical))
    return above + below - 1.0


SEED = "train.seed"


@dataclass(frozen=True)
class Pair:
    """An arm and its control, reduced to what T3 needs of them: a study's records do not fit into memory at once."""

    kind: str
    """Digest of both configurations but for their seeds."""
    seed: int
    arm: Path
    names: str
    differences: Mapping[str, float]


def reduced(arm: Record, control: Record, margins: Mapping[str, float], window: int) -> Pair:
    """Args: margins, window: as of `over_seeds`."""
    kind = hashlib.sha256((_kind(arm) + _kind(control)).encode()).hexdigest()
    differences = {measure: _difference(measure, arm, control, window) for measure in margins}
    return Pair(kind, int(arm.config[SEED]), arm.path, f"{arm.name} against {control.name}", differences)


def over_seeds(pairs: Sequence[Pair], margins: Mapping[str, float]) -> list[SeedVerdict]:
    """T3 of every arm with more than one seed.

    Args: pairs: comparable arms and controls, each of one seed. margins: by measure, loss or grad_norm: largest
    irrelevant mean difference.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.kind, []).append(pair)
    several = {kind: group for kind, group in groups.items() if len({pair.seed for pair in group}) > 1}
    if not several or not margins:
        return []
    differences = {
        kind: {measure: [pair.differences[measure] for pair in group] for measure in margins}
        for kind, group in several.items()
    }
    found = decide(differences, margins)
    return [_told(several[kind], found[kind]) for kind in several]


def _told(group: Sequence[Pair], found: SeedVerdict) -> SeedVerdict:
    sentence = f"{found.outcome.value}: {group[0].names} over {len(group)} seeds: {found.sentence}."
    return replace(found, sentence=sentence, arms=tuple(str(pair.arm) for pair in group))


def _kind(run: Record) -> str:
    kept = {key: value for key, value in run.config.items() if key != SEED and key.split(".")[0] not in EXCLUDED}
    return json.dumps(kept, sort_keys=True, default=str)


def _difference(measure: str, arm: Record, control: Record, window: int) -> float:
    """Difference of the window's means; the window is the last `window` steps, or the later half for 0."""
    left, right = (_last(run.series(measure), window) for run in (arm, control))
    if measure == "grad_norm":
        ratios = [a / c if c > 0 else math.nan for a, c in zip(left, right, strict=True)]
        return math.fsum(math.log(ratio) if ratio > 0 else math.nan for ratio in ratios) / len(ratios)
    whole = math.fsum(right)
    return (math.fsum(left) - whole) / whole if whole else math.nan


def _last(series: Sequence[float | None], window: int) -> list[float]:
    count = window or (len(series) + 1) // 2
    return [math.nan if value is None else value for value in series[-count:]]
