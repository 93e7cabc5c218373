"""T3 on studies: seeds are paired, reduced to a number each, and decide what single pairs leave open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.parity import Outcome, study_text, verdict
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_json, edit_lines
from tests.parity.lab import CLEAN, as_study, write

SEEDS = range(5)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Five seeds of a control and of a clean arm."""
    controls = [write(tmp_path, replace(FP32, seed=seed)) for seed in SEEDS]
    arms = [write(tmp_path, replace(OURS, seed=seed, strategy="optim_grads")) for seed in SEEDS]
    as_study(tmp_path, dict.fromkeys(controls) | dict(zip(arms, controls, strict=True)), "Is it the same?")
    return tmp_path


def margins(store: Path, **values: float) -> None:
    edit_json(store / "lab" / "study.json", margins=values, window=0)


def spoil(store: Path, factor: float) -> None:
    """Every arm's loss, from the third step on, as a fault would leave it that no single step shows."""

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines[2:]:
            line["loss"] *= factor

    for run in (store / "lab").glob("tiny-native-*"):
        edit_lines(run, change)


def test_without_margins_seeds_are_not_judged_together(store: Path) -> None:
    assert verdict(store, "lab", sources=CLEAN).seeds == ()


def test_equal_training_is_equivalent_over_seeds(store: Path) -> None:
    margins(store, loss=0.001, grad_norm=0.02)
    found = verdict(store, "lab", sources=CLEAN)
    assert [each.outcome for each in found.seeds] == [Outcome.EQUIVALENT]
    assert found.seeds[0].seeds == len(SEEDS)
    assert found.exit_code == 0
    assert "over 5 seeds" in " ".join(study_text(found).split())


def test_a_shift_of_the_loss_is_different_over_seeds(store: Path) -> None:
    spoil(store, 1.004)
    margins(store, loss=0.001)
    found = verdict(store, "lab", sources=CLEAN)
    assert [each.outcome for each in found.seeds] == [Outcome.DIFFERENT]
    assert found.exit_code == 1


def test_a_margin_that_the_noise_swamps_is_undecided_and_names_the_seeds(store: Path) -> None:
    margins(store, loss=1e-9)
    found = verdict(store, "lab", sources=CLEAN)
    [seeds] = found.seeds
    assert seeds.outcome is Outcome.UNDECIDED
    assert "seeds would decide it" in seeds.sentence or "no number of seeds" in seeds.sentence
    assert found.exit_code == 3
