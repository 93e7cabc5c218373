"""The suite against engines that are wrong on purpose: one that cannot fail checks nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.engines.adapter import Adapter
from tests.engines.conformance.cases import Case
from tests.engines.conformance.mutants import MUTANTS, NEEDS
from tests.engines.conformance.spawned import run_all
from tests.engines.conformance.test_conformance import failures
from tests.engines.conformance.trial import Evidence, Failure

pytestmark = pytest.mark.timeout(1200)  # the first case of a number of ranks runs them all

BASE = Case("ext", "optim", None, 2, 2, "adamw", True, "bf16", "odd", "deterministic")


def case_of(engine: type[Adapter]) -> Case:
    optimizer = NEEDS.get(engine, BASE.optimizer)
    return replace(BASE, adapter=f"{engine.__module__}:{engine.__name__}", optimizer=optimizer)


@cache
def evidence() -> dict[Case, list[Evidence] | str]:
    """All of them, and the right one, in one process group."""
    return run_all([case_of(engine) for engine in (Adapter, *MUTANTS)])


def found(engine: type[Adapter]) -> list[Failure]:
    ranks = evidence()[case_of(engine)]
    assert not isinstance(ranks, str), ranks
    return failures(case_of(engine), ranks)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_engine_is_found(mutant: type[Adapter]) -> None:
    assert MUTANTS[mutant] in {failure.check for failure in found(mutant)}


def test_the_right_one_is_not() -> None:
    assert not found(Adapter)
