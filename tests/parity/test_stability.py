"""Bounds on growth hold while the control is stable; a run that bursts says nothing more about single steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.parity import Outcome
from harness.parity.tiers import trajectory
from harness.parity.tiers.trajectory import stable_until
from tests.parity.conftest import Bench
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_lines
from tests.support.mutants import finds


@pytest.mark.parametrize(
    ("norms", "last"),
    [
        ([5.0, 3.0, 2.0, 2.5, 1.0], 5),
        ([1.0, 1.9, 3.7, 7.0], 4),  # doubling by steps below two is growth, no burst
        ([5.6, 2.9, 2.2, 3.3, 15.1, 12.2], 3),
        ([1.0, 2.5, 1.0], 1),
        ([None, 1.0, None, 2.5], 2),
        ([], 0),
    ],
)
def test_the_last_step_that_is_judged(norms: list[float | None], last: int) -> None:
    assert stable_until(norms) == last


def burst(lines: list[dict[str, float]]) -> None:
    for line in lines[8:]:
        line["grad_norm"] *= 100


@pytest.mark.parametrize(
    ("arm_bursts", "control_bursts", "is_different"), [(True, False, True), (False, False, True), (True, True, False)]
)
def test_apart_in_a_stable_control_is_different_and_in_a_bursting_one_not(
    bench: Bench, tmp_path: Path, arm_bursts: bool, control_bursts: bool, is_different: bool
) -> None:
    """Two clean runs whose losses come apart at step 8; in one or both the norms burst there."""
    arm, control = bench.copy(OURS, tmp_path / "arm"), bench.copy(FP32, tmp_path / "control")
    for run, bursts in ((arm, arm_bursts), (control, control_bursts)):
        edit_lines(run, burst if bursts else lambda lines: None)
    edit_lines(arm, lambda lines: lines[7].update(loss=lines[7]["loss"] * 1.02))
    assert (bench.held(arm, control).outcome is Outcome.DIFFERENT) == is_different


test_a_rule_that_looks_away_is_found = finds(
    "The comparator",
    test_apart_in_a_stable_control_is_different_and_in_a_bursting_one_not="""
        looks away early: A norm of a fifth of the largest before it counts as a burst
            parity.tiers.trajectory.UNSTABLE: 0.2
            (arm_bursts=False, control_bursts=False, is_different=True)
    """,
)


# -- growth that was seen ----------------------------------------------------------------------------------------------

FLOOR = 2e-7
GROWN: dict[str, tuple[list[float], list[int] | None, bool]] = {
    "600-fold in one step, as AdamW at 60 times its rate": ([1e-6, 1e-5, 1e-4, 6e-2], None, True),
    "out of rounding at one blow": ([1e-7, 2e-7, 2e-7, 1e-3], None, False),
    "as fast as it was seen to, and as fast squared": ([1e-6, 1e-4, 0.9], None, True),
    "out of what was below the floor": ([0.0, 1e-12, FLOOR * 600], None, True),
    "fast once, long ago": ([1e-6, 1e-4, 1e-4, 1e-4, 0.9], None, True),
    "the first there is": ([1e-6], None, False),
    "a step that is not a number": ([1e-6, float("nan"), 1e-5, 5e-3], None, True),
    "600-fold in each step between two captures": ([1e-6, 1e-4, 1e-4 * 600.0**3], [1, 2, 5], True),
    "over many steps no faster than over one": ([1e-6, 9e-3], [2, 4], True),
    "1,000-fold over four steps is slow": ([FLOOR, 1e3 * FLOOR, 1e6 * FLOOR], [1, 5, 6], False),
}
"""Differences of a pair, the steps of each, and whether what was seen before explains the last."""


def wrongly_grown() -> Iterator[str]:
    """What is explained and should not be, or the reverse; lazily."""
    for name, (differences, steps, explained) in GROWN.items():
        bounds = trajectory.grown(np.array(differences), FLOOR, None if steps is None else np.array(steps))
        if (differences[-1] <= bounds[-1]) != explained:
            yield f"{name}: {bounds[-1]}"


test_a_mutant_is_found = finds(
    "The comparator: how runs part",
    wrongly_grown="""
        growth once: A factor is not squared
            parity.tiers.trajectory.grown: fastest[:-1] ** (2 * gaps[1:]) => fastest[:-1] ** gaps[1:]
        growth of itself: A leap explains itself
            parity.tiers.trajectory.grown: largest[:-1] * fastest[:-1] => largest[:-1] * fastest[1:]
        steps between are one: Captures that lie apart are taken to follow each other
            parity.tiers.trajectory.grown: ** (2 * gaps[1:]) => ** 2
        speed over the gap: What grew over many steps is taken to have grown in one
            parity.tiers.trajectory.grown: ** (1 / gaps[1:]) => ** 1.0
        only the last factor: Fast growth of long ago is forgotten
            parity.tiers.trajectory.grown: np.maximum.accumulate(factors) => factors
        growth of 10 at least: 600-fold growth in a step is refuted
            parity.tiers.trajectory.HOT_GROWTH: 10.0
        growth of 200 at least: A leap out of rounding is growth
            parity.tiers.trajectory.HOT_GROWTH: 200.0
    """,
)
