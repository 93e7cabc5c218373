"""A rank that takes more memory than was asked for, on a real cluster that watches it; nobody but SLURM can say why."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.slurm.scheduler import Scheduler
from harness.store import status
from harness.store.rundir import Store
from harness.store.status import State
from tests.slurm.cluster import NEEDED, Cluster, running
from tests.slurm.test_study import request, until
from tests.support.needs import skip_without

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(900)]

WATCHED = """
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill
JobAcctGatherFrequency=task=1
"""
EATS = """
import time
from harness.train.callbacks import Callback

kept = []

class Eat(Callback):
    def step(self, step, record, engine):
        if step == 2:
            kept.append(b"x" * (3 << 29))
            time.sleep(600)
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Nodes whose slurmd sums up what a job's processes use, every second."""
    skip_without(*NEEDED)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with running(folder, more=WATCHED) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_that_is_ended_for_its_memory_says_so(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eats.py").write_text(EATS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ["measure.callbacks=[eats:Eat]", "cluster.mem_gb=1.5"]
    asked = request(tmp_path / "runs", *words)
    assert asked.returncode == 0, asked.stderr
    (run,) = Store(tmp_path / "runs").runs()

    def found() -> status.Status:
        return status.effective(run.path, Scheduler()) or pytest.fail("no status")

    until(cluster, lambda: found().state not in (State.queued, State.running), 300, pause_s=1.0)
    assert found().state is State.failed
    assert "SLURM ended it for the memory it used: ask for more (cluster.mem_gb)" in found().reason
