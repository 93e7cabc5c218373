"""An exception in one cell of an array on a real cluster: told in its own words, and no other cell is spoilt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.slurm.scheduler import Scheduler
from harness.store import status
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.slurm.cluster import Cluster
from tests.slurm.test_study import numbers, request, until

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(900)]

RAISES = """
from harness.train.callbacks import Callback

class Raise(Callback):
    def step(self, step, record, engine):
        if step == 2:
            raise ArithmeticError("step two cannot be")
"""


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """Nobody sees another's jobs."""
    yield
    cluster.clear()


def effective(run: RunDir) -> State | None:
    found = status.effective(run.path, Scheduler())
    return None if found is None else found.state


def test_an_exception_is_told_in_its_words_and_spoils_no_other_cell(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    store = tmp_path / "runs"
    asked = request(store, "-m", "measure.callbacks=[],[raises:Raise]")
    assert asked.returncode == 0, asked.stderr
    runs = Store(store).runs()
    assert len(runs) == 2
    until(cluster, lambda: {effective(run) for run in runs} == {State.done, State.failed}, 300)
    failed = next(run for run in runs if effective(run) is State.failed)
    found = failed.status()
    assert found is not None
    assert "ArithmeticError: step two cannot be" in found.reason
    assert "raises:Raise" in (failed.path / "config.yaml").read_text()
    assert len(numbers(failed)) <= 2
