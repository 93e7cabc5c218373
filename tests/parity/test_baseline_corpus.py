"""Faults of simulated engines are DIFFERENT against a golden file, and clean pairs pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.parity.gate import gate, made
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, TWINS, Case


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in (*FAULTS, *TWINS)])
def test_the_corpus_is_judged_as_against_the_run(case: Case, bench: Bench, tmp_path: Path) -> None:
    golden = tmp_path / "golden.npz"
    golden.write_bytes(made(bench.run(replace(case.control, checked=True))))
    found = gate(bench.run(replace(case.arm, checked=True)), golden)
    assert found.exit_code == (1 if case in FAULTS else 0), found.sentence
