"""A captured update that follows no other is captured with the weights and moments it began with, so that the
optimizer's rule can be asked of whole tensors at any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.parity.alone import optimizer
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from tests.support.factory import freeze, train
from tests.support.spawn import run_ranks
from tests.train.test_step_checks import configured

KINDS = ("native-optim_grads_params", "native-hybrid", "fsdp2", "ddp")
CAPTURED = [1, 2, 4]
CHANGES = {"measure__capture_steps": CAPTURED, "measure__update_steps": CAPTURED, "measure__step_checks": False}


def trains(rank: int, folder: str) -> None:
    for kind in KINDS:
        train(configured(kind, **CHANGES), Path(folder, kind), rank)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    folder = tmp_path_factory.mktemp("moments")
    run_ranks(trains, 2, str(folder))
    for kind in KINDS:
        freeze(configured(kind, **CHANGES), folder / kind)
    return {kind: load(folder / kind) for kind in KINDS}


def found(record: Record) -> dict[int, list[Finding]]:
    steps: dict[int, list[Finding]] = {}
    for finding in optimizer.check(record):
        assert finding.step is not None
        steps.setdefault(finding.step, []).append(finding)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_every_captured_update_follows_its_rule(records: dict[str, Record], kind: str) -> None:
    record = records[kind]
    assert (sorted(record.weights), sorted(record.moments)) == ([1, 4], [4])
    steps = found(record)
    assert sorted(steps) == CAPTURED
    assert {finding.tensor for finding in steps[4]} == record.captures[4].tensors.keys()
    assert all(finding.grade is Grade.ok for each in steps.values() for finding in each)


def test_an_update_by_other_moments_is_found(records: dict[str, Record]) -> None:
    record = records[KINDS[0]]
    stale = replace(record, moments={4: records["fsdp2"].weights[1]})
    assert 4 not in found(stale), "moments that are not there are not taken for nought"
    forgotten = replace(record, moments={}, weights={1: record.weights[1]})
    assert sorted(found(forgotten)) == [1, 2]
    twice = replace(record, captures={**record.captures, 4: record.captures[2]})
    assert any(finding.grade is Grade.bad for finding in found(twice)[4])
