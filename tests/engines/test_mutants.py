"""The suite against engines that are wrong on purpose: one that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.engines.adapter import Adapter
from tests.engines.conformance.cases import Case
from tests.engines.conformance.mutants import ALONE, MUTANTS, NEEDS
from tests.engines.conformance.spawned import run_all
from tests.engines.conformance.test_conformance import failures
from tests.engines.conformance.trial import Evidence, Failure
from tests.support.mutants import kills

AREA = "Engines, by the conformance suite"
pytestmark = pytest.mark.timeout(1200)  # the first one runs them all

BASE = Case("ext", "optim", None, 2, 2, "adamw", True, "bf16", "odd", "deterministic")


def case_of(engine: type[Adapter], world_size: int | None = None) -> Case:
    """The cheapest training that shows what is wrong: two ranks where it lies between them, one where it does not."""
    world_size = world_size or (1 if engine in ALONE else 2)
    adapter, optimizer = f"{engine.__module__}:{engine.__name__}", NEEDS.get(engine, BASE.optimizer)
    return replace(BASE, adapter=adapter, optimizer=optimizer, world_size=world_size)


RIGHT = [case_of(Adapter, world_size) for world_size in (1, 2)]


@cache
def evidence() -> dict[Case, list[Evidence] | str]:
    """All of them, and the right one, in two visits of one process group each."""
    return run_all([*RIGHT, *map(case_of, MUTANTS)])


def found(case: Case) -> list[Failure]:
    ranks = evidence()[case]
    assert not isinstance(ranks, str), ranks
    return failures(case, ranks)


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.__name__, marks=kills(AREA, each.__name__, each.__doc__)) for each in MUTANTS]
)
def test_a_wrong_engine_is_found(mutant: type[Adapter], killed_in: Callable[[float], None]) -> None:
    case = case_of(mutant)
    assert MUTANTS[mutant] in {failure.check for failure in found(case)}
    killed_in(evidence()[case][0].seconds)


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_the_right_one_is_not(case: Case) -> None:
    assert not found(case)
