"""launch.wait=true: a run that cannot be looked at any more is no run that is done."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from harness.launch import watch
from harness.launch.terminal import Terminal
from harness.launch.watch import wait_for
from harness.store import status
from harness.store.rundir import RunDir, Store
from harness.store.status import State, Status
from tests.launch.cells import make_cell
from tests.support.mutants import Slip, kills


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    monkeypatch.setattr(watch, "probe", lambda: None)
    runs = [Store(tmp_path).create(make_cell(tmp_path, f"train.replicate={number}")) for number in (0, 1, 2)]
    for run in runs:
        status.write(run.path, Status(State.done, "1 step", 0))
    return runs


def test_a_run_that_is_gone_or_damaged_is_not_done(done: list[RunDir]) -> None:
    assert wait_for(done, Terminal(io.StringIO())) == [0, 0, 0]
    shutil.rmtree(done[0].path)
    (done[1].path / status.FILE).write_text("{")
    assert wait_for(done, Terminal(io.StringIO())) == [1, 1, 0]


@kills("launching", "gone is done", "A run whose folder is gone counts as done")
def test_a_run_that_is_gone_counting_as_done_is_found(done: list[RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(watch, "row", 'run.path.parent.name, "damaged"', 'run.path.parent.name, "done"').put(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_run_that_is_gone_or_damaged_is_not_done(done)
