"""Every engine does what `harness.engines.protocol` says, under every choice its row of capabilities allows.

python -m pytest --engine fsdp2                               one engine, all of its cases
python -m pytest --engine ext --adapter package.module:Class  an engine of your own

Without --engine it is every engine that is installed: a part of its cases, in which each value of each axis occurs;
under `make test-all` all of them, in which every two values occur together.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.config.capabilities import ENGINES
from harness.config.schema import EngineName
from harness.store.provenance import versions
from tests.engines.adapter import Adapter
from tests.engines.conformance.cases import Case, cases, core
from tests.engines.conformance.checks import Judgement
from tests.engines.conformance.deviations import KNOWN_DEVIATIONS
from tests.engines.conformance.spawned import run_all
from tests.engines.conformance.trial import Evidence, Failure, train_alone

pytestmark = pytest.mark.timeout(1800)  # the first case of an engine runs its others too

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = f"{Adapter.__module__}:{Adapter.__name__}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item a case of every engine that is installed, and one an engine."""
    asked = metafunc.config.getoption("--engine")
    names = [EngineName[asked]] if asked else list(EngineName)
    missing = [name for name in names if not _is_installed(name)]
    if "case" in metafunc.fixturenames:
        adapter = metafunc.config.getoption("--adapter") or EXAMPLE
        found = [
            _parameter(case, asked is not None)
            for name in names
            if name not in missing
            for case in cases(name.name, adapter if name is EngineName.ext else None)
        ]
        metafunc.parametrize("case", found)
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", names, ids=[name.name for name in names])


def _parameter(case: Case, all_are_asked_for: bool) -> Any:
    """A case, which runs in `make test-all` alone unless it is of the core or its engine was asked for."""
    return pytest.param(case, id=str(case), marks=[] if all_are_asked_for or _is_core(case) else [pytest.mark.full])


def test_conforms(case: Case) -> None:
    """Everything one case shows."""
    ranks = evidence(case.engine, case.adapter, _is_core(case))[case]
    assert not isinstance(ranks, str), ranks
    found = failures(case, ranks)
    for deviation in KNOWN_DEVIATIONS:
        if deviation.applies(case):
            known = [failure for failure in found if failure.check in deviation.checks]
            assert known, f"no longer deviates as in {deviation.report}: take it out of KNOWN_DEVIATIONS"
            found = [failure for failure in found if failure not in known]
    assert not found, "\n".join(f"{failure.check}: {failure.text}" for failure in found)


def test_is_installed(name: EngineName) -> None:
    """Says how to get what is missing; what is there has cases."""
    if not _is_installed(name):
        pytest.skip(f"engine={name.name} needs {ENGINES[name].package}: make peers, or {ENGINES[name].install}")
    assert cases(name.name, EXAMPLE if name is EngineName.ext else None)


def test_deviations_are_reported() -> None:
    """What the suite forgives a peer is written down where the peer's authors can read it."""
    assert all((REPOSITORY / deviation.report).is_file() for deviation in KNOWN_DEVIATIONS)


@cache
def evidence(engine: str, adapter: str | None, of_core: bool) -> dict[Case, list[Evidence] | str]:
    """All cases of one engine that are, or are not, of its core, run once."""
    return run_all([case for case in cases(engine, adapter) if _is_core(case) is of_core])


def _is_core(case: Case) -> bool:
    return case in core(case.engine, case.adapter)


def failures(case: Case, ranks: list[Evidence]) -> list[Failure]:
    """What a case did not do as promised."""
    peer = reference(case, "bf16" if case.dtype.startswith("bf16") else case.dtype)
    return Judgement(case, case.config(), ranks, reference(case, "fp64"), peer).failures()


_references: dict[str, Evidence] = {}


def reference(case: Case, dtype: str) -> Evidence:
    """`single` on the case's microbatches; cases that differ in their engine alone share it."""
    config = case.reference(dtype)
    if (key := repr(config)) not in _references:
        _references[key] = train_alone(config)
    return _references[key]


def _is_installed(name: EngineName) -> bool:
    wanted = ENGINES[name].package
    if wanted is None:
        return True
    package, _, version = wanted.partition("==")
    return versions((package,)).get(package) == version
