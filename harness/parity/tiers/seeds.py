"""T3 on a study: runs of several seeds, paired with their controls, each pair reduced to one number a measure.

    loss        mean over the window of (arm - control), over the control's mean: a relative difference
    grad_norm   mean over the window of log(arm / control)

The window is the run's later half unless the study says how many last steps it is. Steps of a run are correlated, so a
run gives one number and no more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.parity.outcome import Outcome, SeedVerdict, percent
from harness.parity.record import Record
from harness.parity.tiers.equivalence import Decision, PairedTest, decide
from harness.store.identity import EXCLUDED

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
    decisions = decide(differences, margins)
    return [_verdict(several[kind], decisions[kind]) for kind in several]


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


def _verdict(group: Sequence[Pair], decision: Decision) -> SeedVerdict:
    return SeedVerdict(
        outcome=decision.outcome,
        sentence=f"{decision.outcome.value}: {group[0].names} over {len(group)} seeds: {_said(decision)}.",
        arms=tuple(str(pair.arm) for pair in group),
        seeds=len(group),
        seeds_needed=decision.seeds_needed,
        p_equivalent=decision.p_equivalent,
        p_different=decision.p_different,
        tests=tuple(_plain(test) for test in decision.tests),
    )


def _said(decision: Decision) -> str:
    said = "; ".join(
        f"{test.measure} is off by {percent(test.mean)} (90 % interval {percent(test.low)} to {percent(test.high)}) "
        f"where {percent(test.margin)} does not matter"
        for test in decision.tests
    )
    if decision.outcome is not Outcome.UNDECIDED:
        return said
    if decision.seeds_needed is None:
        return f"{said}; no number of seeds is known to decide it"
    return f"{said}; {decision.seeds_needed} seeds would decide it"


def _plain(test: PairedTest) -> Mapping[str, Any]:
    return dict(vars(test))
