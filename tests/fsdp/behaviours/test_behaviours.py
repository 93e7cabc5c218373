"""Our engine has every behaviour, and every mutant of it is found.

All checks of one number of ranks run in one set of processes, right engine and mutants alike. What is PENDING must
fail: an entry that no longer does is to be taken out of the table.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.fsdp.behaviours.catalog import BEHAVIOURS, DECIDED, PENDING, UNPROVEN, WAITING
from tests.fsdp.behaviours.running import FAILS, HOLDS, Answer, Trial, run

pytestmark = pytest.mark.timeout(1200)  # the first of a number of ranks runs them all

RIGHT = [Trial("native", key) for key in BEHAVIOURS]
MUTANTS = [Trial("native", key, place) for key, b in BEHAVIOURS.items() for place in range(len(b.mutants))]


@cache
def answers(ranks: int) -> dict[Trial, Answer]:
    """All trials of this number of ranks; no mutants of what the engine does not have."""
    todo = [trial for trial in RIGHT + MUTANTS if trial.mutant is None or trial.key not in PENDING]
    return run([trial for trial in todo if BEHAVIOURS[trial.key].ranks == ranks], ranks)


def answer(trial: Trial) -> Answer:
    return answers(BEHAVIOURS[trial.key].ranks)[trial]


def marked(trials: list[Trial]) -> list[object]:
    """Parameters; those of what is pending have to fail."""
    return [
        pytest.param(
            trial,
            id=trial.key if trial.mutant is None else f"{trial.key}-mutant{trial.mutant}",
            marks=[pytest.mark.xfail(reason=PENDING[trial.key], strict=True)] if trial.key in PENDING else [],
        )
        for trial in trials
    ]


@pytest.mark.parametrize("trial", marked(RIGHT))
def test_the_engine_has_the_behaviour(trial: Trial) -> None:
    found = answer(trial)
    print(f"{trial.key}: {found.outcome}: {found.fact} ({found.seconds:.1f} s)")
    assert found.outcome == HOLDS, f"{found.fact}\n{found.trace}"


@pytest.mark.parametrize("trial", marked(MUTANTS))
def test_a_mutant_is_found(trial: Trial) -> None:
    """By a measured claim, or by what the mutant raises; never because ranks wait for each other until a limit."""
    assert trial.key not in PENDING, "not run before the engine has the behaviour"
    assert trial.mutant is not None
    found = answer(trial)
    print(f"{trial.key}, {BEHAVIOURS[trial.key].mutants[trial.mutant].says}: {found.outcome}: {found.fact}")
    assert found.outcome == FAILS, f"survives: {found.fact}"
    assert "imed out" not in found.fact, found.trace


def test_every_number_is_accounted_for() -> None:
    checked = {behaviour.number for behaviour in BEHAVIOURS.values()}
    assert checked | set(DECIDED) | set(UNPROVEN) | set(WAITING) == set(range(1, 49))
    assert set(PENDING) <= set(BEHAVIOURS)
    assert all(behaviour.mutants for behaviour in BEHAVIOURS.values())
