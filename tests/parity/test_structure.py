"""What a run says of its own tensors: replicas, memory, ties, and weights that hold each other's bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.parity import Outcome, Verdict, compare
from harness.parity.alone import structure
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.edits import edit_json
from tests.parity.lab import CLEAN
from tests.support.mutants import each

SEEN = Arm(engine="native", strategy="optim", witnessed=True, captures=(1, 2))
CONTROL = Arm(engine="ddp", strategy="no_shard", captures=(1, 2))
WHOLE = {"aliases": [], "untied": [], "elsewhere": []}
APART = {"blocks.0.w_up.weight": 17, "blocks.1.w_up.weight": 18, "blocks.0.norm.weight": 18}


def edited(bench: Bench, tmp_path: Path, structure: dict[str, Any], kept: dict[str, int], **summary: Any) -> Verdict:
    run = tmp_path / "lab" / "run"
    shutil.copytree(bench.run(SEEN), run)
    edit_json(run / "summary.json", structure=structure, **{"other_replicas": [], **summary})
    edit_json(run / "capture" / "witness-000002.json", kept=kept)
    return compare(run, bench.run(CONTROL), sources=CLEAN)


def test_a_sound_run_is_told_so(bench: Bench, tmp_path: Path) -> None:
    verdict = edited(bench, tmp_path, WHOLE, APART)
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT)
    assert {"replicas", "tensors apart", "ties kept", "weights apart"} <= {row.check for row in verdict.evidence}


FAULTS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], str]] = {
    "replica": (WHOLE, APART, {"other_replicas": [1]}, "replicas (gather) is rank 1 ends with other weights"),
    "alias": (
        {**WHOLE, "aliases": [["a/exp_avg", "b/exp_avg"]]},
        APART,
        {},
        "tensors apart (weights, first in a/exp_avg) is shares memory with b/exp_avg",
    ),
    "alias on another rank": ({**WHOLE, "elsewhere": ["rank 1"]}, APART, {}, "not on rank 1"),
    "tie": ({**WHOLE, "untied": ["head.weight"]}, APART, {}, "ties kept (weights, first in head.weight)"),
    "one weight for two": (
        WHOLE,
        {**APART, "blocks.1.w_up.weight": 17},
        {},
        "weights apart (weights, first in blocks.0.w_up.weight) is has the bits of blocks.1.w_up.weight",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_different_and_named(bench: Bench, tmp_path: Path, name: str) -> None:
    facts, kept, summary, says = FAULTS[name]
    verdict = edited(bench, tmp_path, facts, kept, **summary)
    assert verdict.outcome is Outcome.DIFFERENT
    assert says in verdict.sentence


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "replica": ("_replicas", lambda run: []),
    "alias": ("_memory", lambda run: []),
    "one weight for two": ("_apart", lambda run: []),
}


@pytest.mark.parametrize(
    "mutant",
    each("The comparator: structure", ((name, f"not looked at: {name}") for name in MUTANTS)),
)
def test_a_check_that_is_switched_off_is_noticed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    facts, kept, summary, _ = FAULTS[mutant]
    name, blind = MUTANTS[mutant]
    monkeypatch.setattr(structure, name, blind)
    assert edited(bench, tmp_path, facts, kept, **summary).outcome in (Outcome.EQUAL, Outcome.EQUIVALENT)
