"""The suite against engines that are wrong on purpose: one that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.engines.adapter import Adapter
from tests.engines.conformance.cases import Case
from tests.engines.conformance.mutants import MUTANTS, __name__ as WRONG
from tests.engines.conformance.spawned import run_all
from tests.engines.conformance.test_conformance import failures
from tests.engines.conformance.trial import Evidence, Failure
from tests.support.mutants import each

pytestmark = pytest.mark.timeout(1200)  # the first one runs them all

BASE = Case("ext", "optim", None, 2, 2, "adamw", True, "bf16", "odd", "deterministic")


def case_of(adapter: str, world_size: int, optimizer: str = BASE.optimizer) -> Case:
    return replace(BASE, adapter=adapter, world_size=world_size, optimizer=optimizer)


CASES = {name: case_of(f"{WRONG}:{name}", mutant.ranks, mutant.optimizer) for name, mutant in MUTANTS.items()}
RIGHT = [case_of(f"{Adapter.__module__}:{Adapter.__name__}", world_size) for world_size in (1, 2)]


@cache
def evidence() -> dict[Case, list[Evidence] | str]:
    """All of them, and the right one, in two visits of one process group each."""
    return run_all([*RIGHT, *CASES.values()])


def found(case: Case) -> list[Failure]:
    ranks = evidence()[case]
    assert not isinstance(ranks, str), ranks
    return failures(case, ranks)


@pytest.mark.parametrize("name", each("Engines, by the conformance suite", MUTANTS))
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    assert MUTANTS[name].check in {failure.check for failure in found(CASES[name])}
    killed_in(evidence()[CASES[name]][0].seconds)


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_the_right_one_is_not(case: Case) -> None:
    assert not found(case)
