"""Faults that no judge has seen act: a run with one has other losses, norms or weights than its baseline without it.

There are none while `SEALED` is 0: then all of this is skipped, until another edition is written.

Nothing is judged here, and nothing else in the suite holds one of them against a verdict; see [Note: Edition] of
`tests.faults.corpus`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.power import steps, whole
from benchmarks.power.steps import BASE
from tests.faults.corpus import SEALED, corpus
from tests.study import short
from tests.support.covering import covering, once

FAULTS = {name: fault for name, fault in corpus().items() if fault.is_held_out}
FEW = {[*FAULTS][place] for place in covering([(fault.stage,) for fault in FAULTS.values()], 1)}
"""Faults of `make test`: each stage once."""

# while an edition is sealed nothing else runs its faults; afterwards tests/study/test_power.py judges them
pytestmark = pytest.mark.skipif(not SEALED, reason="every fault was shown to the judges")


def baseline(name: str) -> short.Overrides:
    quick = (*BASE[:-2], "measure.capture_steps=[]", "measure.step_checks=false", "train.steps=3", "model.num_layers=2")
    return (*quick, *(("ckpt=last",) if FAULTS[name].resumes else ()), *FAULTS[name].cell)


def arm(name: str) -> short.Overrides:
    return (*baseline(name), *FAULTS[name].asked())


def left(run: Path) -> tuple[Any, ...]:
    """What a run says of itself: losses, norms and what was fed, step by step, and the last weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [[line[key] for key in ("step", "loss", "grad_norm", "data_digest")] for line in lines]
    return told, json.loads((run / "summary.json").read_text())["final_weights"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """What a fault's run and its baseline say, by the fault's name; the first of `make test`'s, and the first of the
    others, runs its part."""

    @once
    def part(few: bool) -> dict[short.Overrides, Path]:
        names = [name for name in FAULTS if (name in FEW) is few]
        halved = [arm(name) for name in names if FAULTS[name].resumes]
        wanted = [*map(arm, names), *map(baseline, names)]
        return short.runs(wanted, tmp_path_factory.mktemp("sealed") / "runs", (), halved)

    def both(name: str) -> tuple[Any, Any]:
        runs = part(name in FEW)
        return left(runs[arm(name)]), left(runs[baseline(name)])

    return both


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in FAULTS])
def test_it_acts(seen: Callable[[str], tuple[Any, Any]], name: str) -> None:
    with_it, without = seen(name)
    assert len(with_it[0]) == len(without[0]) == 3
    assert with_it != without


def test_they_are_of_every_stage_and_of_no_other_study() -> None:
    assert len(FAULTS) >= 20
    assert {fault.stage for fault in FAULTS.values()} >= {fault.stage for fault in corpus().values()}
    for pairs in (steps.pairs(), steps.pairs(short=True), whole.pairs()):
        assert not FAULTS.keys() & {pair.name for pair in pairs}
