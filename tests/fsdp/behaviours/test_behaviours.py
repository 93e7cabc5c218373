"""Our engine has every behaviour, and every mutant of it is found.

All checks of one number of ranks run in one set of processes, right engine and mutants alike. What is PENDING must
fail: an entry that no longer does is to be taken out of the table. `make test-all` puts the checks of saved state to
every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.fsdp.behaviours.catalog import BEHAVIOURS, DECIDED, PENDING, UNPROVEN, WAITING
from tests.fsdp.behaviours.running import FAILS, HOLDS, Answer, Trial, run
from tests.support.mutants import kills

pytestmark = pytest.mark.timeout(1200)  # the first of a number of ranks runs them all

RIGHT = [Trial("native", key) for key in BEHAVIOURS]
WHOLE = [Trial("native", key, whole=True) for key, b in BEHAVIOURS.items() if b.shortened]
MUTANTS = [Trial("native", key, place) for key, b in BEHAVIOURS.items() for place in range(len(b.mutants))]


@cache
def answers(ranks: int) -> dict[Trial, Answer]:
    """All trials of this number of ranks; no mutants of what the engine does not have."""
    todo = [trial for trial in RIGHT + MUTANTS if trial.mutant is None or trial.key not in PENDING]
    return run([trial for trial in todo if BEHAVIOURS[trial.key].ranks == ranks], ranks)


def answer(trial: Trial) -> Answer:
    ranks = BEHAVIOURS[trial.key].ranks
    return run([trial], ranks)[trial] if trial.whole else answers(ranks)[trial]


def marked(trials: list[Trial]) -> list[object]:
    """Parameters."""
    return [pytest.param(trial, id=named(trial), marks=list(marks(trial))) for trial in trials]


def named(trial: Trial) -> str:
    return trial.key + ("-whole" if trial.whole else "") + ("" if trial.mutant is None else f"-mutant{trial.mutant}")


def marks(trial: Trial) -> Iterator[pytest.MarkDecorator]:
    """What is pending has to fail; a mutant is one of the page of mutants."""
    behaviour = BEHAVIOURS[trial.key]
    if trial.key in PENDING:
        yield pytest.mark.xfail(reason=PENDING[trial.key], strict=True)
    if trial.whole:
        yield pytest.mark.full
    if trial.mutant is not None:
        yield kills("The engine, by its behaviours", named(trial), behaviour.mutants[trial.mutant].says)


@pytest.mark.parametrize("trial", marked(RIGHT + WHOLE))
def test_the_engine_has_the_behaviour(trial: Trial) -> None:
    found = answer(trial)
    print(f"{trial.key}: {found.outcome}: {found.fact} ({found.seconds:.1f} s)")
    assert found.outcome == HOLDS, f"{found.fact}\n{found.trace}"


@pytest.mark.parametrize("trial", marked(MUTANTS))
def test_a_mutant_is_found(trial: Trial, killed_in: Callable[[float], None]) -> None:
    """By a measured claim, or by what the mutant raises; never because ranks wait for each other until a limit."""
    assert trial.key not in PENDING, "not run before the engine has the behaviour"
    assert trial.mutant is not None
    found = answer(trial)
    print(f"{trial.key}, {BEHAVIOURS[trial.key].mutants[trial.mutant].says}: {found.outcome}: {found.fact}")
    assert found.outcome == FAILS, f"survives: {found.fact}"
    assert not any(words in found.fact for words in ("imed out", "did not come about")), found.trace
    assert not found.fact.startswith(("AttributeError", "TypeError", "NameError")), f"no mutant: {found.trace}"
    killed_in(found.seconds)


def test_every_number_is_accounted_for() -> None:
    checked = {behaviour.number for behaviour in BEHAVIOURS.values()}
    assert checked | set(DECIDED) | set(UNPROVEN) | set(WAITING) == set(range(1, 49))
    assert set(PENDING) <= set(BEHAVIOURS)
    assert all(behaviour.mutants for behaviour in BEHAVIOURS.values())
