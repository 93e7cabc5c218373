"""What a run says of its own ranks: that they end with the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.parity import Outcome, Verdict, compare
from harness.parity.alone import witness
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.edits import edit_json
from tests.parity.lab import CLEAN
from tests.support.mutants import kills

CONTROL = Arm(engine="ddp", strategy="no_shard", captures=(1, 2))
PASSES = (Outcome.EQUAL, Outcome.EQUIVALENT)


def judged(bench: Bench, tmp_path: Path, others: list[int]) -> Verdict:
    run = tmp_path / "lab" / "run"
    shutil.copytree(bench.run(Arm(engine="native", strategy="optim", captures=(1, 2))), run)
    edit_json(run / "summary.json", other_replicas=others)
    return compare(run, bench.run(CONTROL), sources=CLEAN)


def test_a_sound_run_is_told_so(bench: Bench, tmp_path: Path) -> None:
    verdict = judged(bench, tmp_path, [])
    assert verdict.outcome in PASSES
    assert "replicas" in {row.check for row in verdict.evidence}


def test_a_rank_with_other_weights_is_different_and_named(bench: Bench, tmp_path: Path) -> None:
    verdict = judged(bench, tmp_path, [1])
    assert verdict.outcome is Outcome.DIFFERENT
    assert "replicas (gather) is rank 1 ends with other weights" in verdict.sentence


@kills("The comparator: structure", "replica", "not looked at: replica")
def test_replicas_that_nobody_looks_at_pass(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "replicas", lambda run: [])
    assert judged(bench, tmp_path, [1]).outcome in PASSES
