"""Our engine with one mistake each: the oracle, or the formulas of traffic and memory, find all of them.

Mistakes are patches that ranks enter for one training: see tests/fsdp/mistakes.py.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from tests.fsdp import test_communication
from tests.fsdp.checked import BROKEN
from tests.fsdp.mistakes import COUNTED, MUTANTS
from tests.fsdp.trial import Case, run_case, wrong
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.visits import Lost, Visit


class Answer(NamedTuple):
    """record: what the training gave. raised: the traceback of what it raised instead."""

    record: Any
    raised: str
    seconds: float


def attempt(rank: int, todo: tuple[str, Case]) -> Answer:
    (name, case), began, raised, record = todo, time.perf_counter(), "", None
    try:
        with MUTANTS[name].patch() if name else nullcontext():
            record = (test_communication.measure_case if case.steps == COUNTED else run_case)(rank, case)
    except Exception:
        raised = traceback.format_exc()
    return Answer(record, raised, time.perf_counter() - began)


def broke_off(answer: Answer) -> bool:
    return bool(answer.raised)


def judge(case: Case, ranks: list[Any]) -> None:
    """Assert that a training is right, by its numbers or by what it sent and kept."""
    if case.steps == COUNTED:
        test_communication.check(case, ranks)
    else:
        told = wrong(case, ranks)
        assert not told, "\n".join(told)


@once
def answers(ranks: int) -> dict[tuple[str, Case], list[Answer | Lost]]:
    """What each rank says of mutants, and of the engine as it is, whose name is ""."""
    cases = {name: mutant.case for name, mutant in MUTANTS.items() if mutant.case.world_size == ranks}
    todo = [*cases.items(), *(("", case) for case in dict.fromkeys(cases.values()))]
    return dict(zip(todo, Visit(attempt, ranks, broke_off, goes_on=True).run(todo), strict=True))


@pytest.mark.parametrize("name", each("The engine, by its oracle", MUTANTS))
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    mutant = MUTANTS[name]
    told = [answer for answer in answers(mutant.case.world_size)[name, mutant.case] if isinstance(answer, Answer)]
    assert told, "no rank came to an end"
    raised = [answer.raised for answer in told if answer.raised]
    if raised:
        assert re.search(mutant.found, raised[0]), raised[0]
        assert not raised[0].splitlines()[-1].startswith(BROKEN), raised[0]
    else:
        with pytest.raises(AssertionError, match=mutant.found):
            judge(mutant.case, [answer.record for answer in told])
    killed_in(max(answer.seconds for answer in told))


@pytest.mark.parametrize("ranks", sorted({mutant.case.world_size for mutant in MUTANTS.values()}))
def test_the_right_one_is_not(ranks: int) -> None:
    for (name, case), told in answers(ranks).items():
        if not name:
            judge(case, [answer.record for answer in told if isinstance(answer, Answer)])
