"""T3 on simulated pairs: what it states about itself is held against what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.parity import Outcome, study_text, verdict
from harness.parity.tiers.equivalence import ALPHA, POWER, decide, holm, paired_test
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_json, edit_lines
from tests.parity.lab import CLEAN, as_study, write
from tests.support.mutants import each_found_by

MARGIN = 1.0
LOSS = {"loss": MARGIN}
TRIALS = 1_500


def outcomes(mean: float, sd: float, pairs: int, arms: int = 1, trials: int = TRIALS) -> list[set[Outcome]]:
    """Outcomes of all arms, trial by trial."""
    draws = np.random.default_rng(7).normal(mean, sd, size=(trials, arms, pairs))
    return [
        {d.outcome for d in decide({str(i): {"loss": list(a)} for i, a in enumerate(t)}, LOSS).values()} for t in draws
    ]


def share(found: list[set[Outcome]], outcome: Outcome) -> float:
    """Share of trials in which any arm has it."""
    return sum(outcome in each for each in found) / len(found)


def at_most(rate: float, trials: int = TRIALS) -> float:
    """What a rate may be seen as in so many trials: four standard errors above."""
    return rate + 4 * (rate * (1 - rate) / trials) ** 0.5


@pytest.mark.parametrize("sd", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pairs", [3, 8, 30])
def test_an_arm_at_the_margin_is_seldom_called_either(sd: float, pairs: int) -> None:
    found = outcomes(MARGIN, sd, pairs)
    assert share(found, Outcome.EQUIVALENT) <= at_most(ALPHA)
    assert share(found, Outcome.DIFFERENT) <= at_most(ALPHA)


def test_the_interval_covers_what_it_states() -> None:
    draws = np.random.default_rng(3).normal(0.4, 1.0, size=(TRIALS, 6))
    covered = [(t := paired_test("loss", list(row), MARGIN)).low <= 0.4 <= t.high for row in draws]
    assert np.mean(covered) == pytest.approx(1 - 2 * ALPHA, abs=0.03)


@pytest.mark.parametrize("arms", [4, 12])
def test_holm_keeps_the_error_of_a_whole_study(arms: int) -> None:
    found = outcomes(MARGIN, 0.3, 8, arms)
    assert share(found, Outcome.EQUIVALENT) <= at_most(ALPHA)
    assert share(found, Outcome.DIFFERENT) <= at_most(ALPHA)


@pytest.mark.parametrize("mean", [0.0, 0.4, 1.8, 3.0])
@pytest.mark.parametrize("arms", [1, 5])
def test_the_number_of_seeds_it_names_decides(mean: float, arms: int) -> None:
    """First too few seeds; then as many as were named, drawn anew, for every arm."""
    generator = np.random.default_rng(11)
    decided = []
    for _ in range(300):
        first = {str(i): {"loss": list(generator.normal(mean, 1.0, 4))} for i in range(arms)}
        named = [d.seeds_needed for d in decide(first, LOSS).values() if d.outcome is Outcome.UNDECIDED]
        if not named or None in named:
            continue
        again = {str(i): {"loss": list(generator.normal(mean, 1.0, max(n for n in named if n)))} for i in range(arms)}
        found = decide(again, LOSS)["0"].outcome
        decided.append(found is (Outcome.EQUIVALENT if mean < MARGIN else Outcome.DIFFERENT))
    assert len(decided) > 30
    assert np.mean(decided) >= POWER - 0.05


@pytest.mark.parametrize("differences", [[], [0.0], [0.0, float("nan")]])
def test_what_allows_no_test_is_undecided(differences: list[float]) -> None:
    found = decide({"a": {"loss": differences}}, LOSS)["a"]
    assert found.outcome is Outcome.UNDECIDED
    assert found.seeds_needed is None


def test_equal_runs_have_no_noise_and_are_equivalent() -> None:
    assert decide({"a": {"loss": [0.0, 0.0]}}, LOSS)["a"].outcome is Outcome.EQUIVALENT


def test_every_measure_must_be_equivalent_and_any_may_differ() -> None:
    calm, off = [0.0, 0.01, -0.01, 0.02], [3.0, 3.01, 2.99, 3.02]
    margins = {"loss": MARGIN, "grad_norm": MARGIN}
    assert decide({"a": {"loss": calm, "grad_norm": off}}, margins)["a"].outcome is Outcome.DIFFERENT
    wide = [1.2, -0.9, 0.3, 0.4]
    assert decide({"a": {"loss": calm, "grad_norm": wide}}, margins)["a"].outcome is Outcome.UNDECIDED


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_a_margin_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        decide({"a": {"loss": [0.0, 0.1]}}, {"loss": 0.0})


# -- studies: pairs of seeds decide what single pairs leave open -------------------------------------------------------

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


def test_seeds_of_a_study_decide_by_its_margins(store: Path) -> None:
    assert verdict(store, "lab", sources=CLEAN).seeds == (), "without margins seeds are not judged together"
    outcomes = []
    for given, factor in (({"loss": 1e-3, "grad_norm": 0.02}, 1.0), ({"loss": 1e-9}, 1.0), ({"loss": 1e-3}, 1.004)):
        margins(store, **given)
        spoil(store, factor)
        found = verdict(store, "lab", sources=CLEAN)
        (seeds,) = found.seeds
        assert (seeds.seeds, seeds.outcome.exit_code) == (len(SEEDS), found.exit_code)
        assert "over 5 seeds" in " ".join(study_text(found).split())
        outcomes.append(seeds.outcome)
        assert seeds.outcome is not Outcome.UNDECIDED or "decide it" in seeds.sentence
    assert outcomes == [Outcome.EQUIVALENT, Outcome.UNDECIDED, Outcome.DIFFERENT]
    assert [each.exit_code for each in outcomes] == [0, 3, 1]


test_a_mutant_is_found = each_found_by(
    "The comparator: paired seeds",
    """
    a wider interval: The interval covers more than it states
        parity.tiers.equivalence._tested: 1.0 - ALPHA => 1.0 - ALPHA / 2
    off from 0: What is not 0 is called different, whatever the margin
        parity.tiers.equivalence._tested: abs(mean) - margin => abs(mean)
    no noise: Equal runs are as likely different as not
        parity.tiers.equivalence._t: math.copysign(math.inf, distance) => 0.0
    step down: Holm's adjusted p-values may fall
        parity.tiers.equivalence.holm: max(so_far, => max(0.0,
    one measure of several: One equivalent measure makes an arm equivalent
        parity.tiers.equivalence.decide: max(each.p_equivalent => min(each.p_equivalent
    all must differ: An arm differs only where every measure does
        parity.tiers.equivalence._bonferroni: * min(p_values) => * max(p_values)
    a margin of 0: A margin of 0 is let through
        parity.tiers.equivalence.paired_test: if not margin > 0 => if margin < 0
    """,
    test_holm_by_hand,
    test_every_measure_must_be_equivalent_and_any_may_differ,
    test_a_margin_of_zero_is_refused,
    test_equal_runs_have_no_noise_and_are_equivalent,
    test_the_interval_covers_what_it_states,
    test_an_arm_at_the_margin_is_seldom_called_either,
)
