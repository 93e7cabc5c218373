"""Bounds on growth hold while the control is stable; a run that bursts says nothing more about single steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.parity import Outcome, compare
from harness.parity.tiers import stability
from harness.parity.tiers.stability import stable_until
from tests.parity.conftest import Bench
from tests.parity.corpus import FP32, OURS
from tests.parity.lab import CLEAN, edit_lines
from tests.support.mutants import kills


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


def burst(run: Path, from_step: int) -> None:
    def change(lines: list[dict[str, float]]) -> None:
        for line in lines[from_step - 1 :]:
            line["grad_norm"] *= 100

    edit_lines(run, change)


def changed(bench: Bench, tmp_path: Path, *, arm_bursts: bool, control_bursts: bool) -> Outcome:
    """Two clean runs whose losses come apart at step 8; in one or both the norms burst there."""
    runs = []
    for arm, bursts, name in ((OURS, arm_bursts, "arm"), (FP32, control_bursts, "control")):
        run = tmp_path / "lab" / name
        shutil.copytree(bench.run(arm), run)
        if bursts:
            burst(run, 9)
        runs.append(run)
    edit_lines(runs[0], lambda lines: lines[7].update(loss=lines[7]["loss"] * 1.02))
    return compare(*runs, sources=CLEAN).outcome


def test_an_arm_that_bursts_alone_is_different(bench: Bench, tmp_path: Path) -> None:
    assert changed(bench, tmp_path, arm_bursts=True, control_bursts=False) is Outcome.DIFFERENT


def test_apart_in_a_stable_control_is_different_and_in_a_bursting_one_not(bench: Bench, tmp_path: Path) -> None:
    assert changed(bench, tmp_path / "stable", arm_bursts=False, control_bursts=False) is Outcome.DIFFERENT
    assert changed(bench, tmp_path / "bursts", arm_bursts=True, control_bursts=True) is not Outcome.DIFFERENT


@kills("The comparator", "looks away early", "A norm of a fifth of the largest before it counts as a burst")
def test_a_rule_that_looks_away_too_easily_is_noticed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "UNSTABLE", 0.2)
    assert changed(bench, tmp_path, arm_bursts=False, control_bursts=False) is not Outcome.DIFFERENT
