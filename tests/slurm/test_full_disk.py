"""The disk of the store fills up under a run of a real cluster: its state is named, and with room again it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.slurm.scheduler import Scheduler
from harness.store import status
from harness.store.metrics import read_metrics
from harness.store.rundir import Store
from harness.store.status import State
from tests.slurm.cluster import Cluster
from tests.slurm.test_study import STEPS, final_weights, job, numbers, request, state, until
from tests.support.disk import fill, small_disk

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    with small_disk(tmp_path, 64) as found:
        yield found


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """Nobody sees another's jobs."""
    yield
    cluster.clear()


def test_a_run_whose_disk_fills_up_is_failed_and_goes_on_with_room_again(cluster: Cluster, disk: Path) -> None:
    root = disk / "runs"
    words = ["-m", "study.name=disk", "train.replicate=0,1", "ckpt.every=10", "cluster.array_parallelism=1"]
    asked = request(root, *words)
    assert asked.returncode == 0, asked.stderr
    full, baseline = Store(root).runs("disk")
    until(cluster, lambda: len(read_metrics(full.metrics)) >= 25)
    cluster.hold()
    fill(disk / "others")
    until(cluster, lambda: cluster.job_states()[job(full)] == "FAILED")
    found = status.effective(full.path, Scheduler())
    assert found is not None
    assert found.state is State.failed
    assert "is FAILED" in found.reason
    reached = len(read_metrics(full.metrics))
    assert 20 <= reached < STEPS
    refused = request(root, *words)
    assert refused.returncode == 2
    assert "no room on the disk" in refused.stderr or "free" in refused.stderr

    (disk / "others").unlink()
    cluster.go()
    asked = request(root, *words)
    assert asked.returncode == 0, asked.stderr
    until(cluster, lambda: {state(full), state(baseline)} == {State.done})
    assert full.attempts() == [0, 1]
    assert [line["step"] for line in read_metrics(full.metrics)] == list(range(1, STEPS + 1))
    assert numbers(full) == numbers(baseline)
    assert final_weights(full) == final_weights(baseline)
