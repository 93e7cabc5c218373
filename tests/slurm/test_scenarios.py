"""What happens to jobs on a real cluster: their nodes are taken away, and their time is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.launch.slurm.scheduler import Scheduler
from harness.store import status
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.slurm import test_study
from tests.slurm.cluster import NEEDED, Cluster, running
from tests.slurm.test_study import REPOSITORY, REQUEST, final_weights, job, numbers, state
from tests.support.needs import skip_without

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(1800)]

MORE = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
PartitionName=low Nodes=ALL Default=NO MaxTime=30 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL Default=NO MaxTime=30 State=UP PriorityTier=10 PreemptMode=OFF
"""
PATIENCE_S = 600.0
STEPS = 60


WORDS = [word for word in REQUEST[2:] if not word.startswith(("cluster.nodes", "train.steps", "data.seq_len"))]
WORDS += ["data.seq_len=32", "measure.step_checks=false", "measure.capture_steps=[1]", "measure.callbacks=[gate:Gate]"]
until = partial(test_study.until, pause_s=0.5)  # to ask SLURM takes a process, and most of what is waited for is long


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of six processors, and partitions that take nodes from one another."""
    skip_without(*NEEDED)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with running(folder, nodes=3, cpus=6, more=MORE) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """No test sees another's jobs, or nodes that it broke."""
    yield
    cluster.clear()
    for name in cluster.nodes:
        cluster.ask("scontrol", "update", f"nodename={name}", "state=resume", check=False)


def request(root: Path, *words: str) -> None:
    """Ask run.py for something on the cluster."""
    command = [*REQUEST[:2], *WORDS, f"launch.root={root}", *words]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY)
    assert asked.returncode == 0, asked.stderr


def effective(run: RunDir) -> State:
    found = status.effective(run.path, Scheduler())
    assert found is not None
    return found.state


GATE = """
import os, time
from harness.train.callbacks import Callback

class Gate(Callback):
    def step(self, step, record, engine):
        if step >= 5 and not os.path.exists({opened!r}):
            time.sleep(0.5)
"""
"""Holds a run up in steps from its fifth on until a file is there: it is not over too soon, and waits at no cost."""


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file; not there at first."""
    (tmp_path / "gate.py").write_text(GATE.format(opened=str(tmp_path / "opened")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "opened"


def test_a_higher_partition_takes_its_node(cluster: Cluster, tmp_path: Path, opened: Path) -> None:
    """And it goes on to the numbers of the same cell under another replicate, to which nothing has happened."""
    steps = f"train.steps={STEPS}"
    request(tmp_path / "runs", steps, "cluster.partition=low", "cluster.time_min=20")
    (run,) = Store(tmp_path / "runs").runs()
    until(cluster, lambda: len(read_metrics(run.metrics)) >= 5, PATIENCE_S)
    node = cluster.ask("squeue", "--noheader", f"--job={job(run)}", "--format=%N").strip()
    taker = ["sbatch", "--partition=high", f"--nodelist={node}", "--exclusive", "--time=5", "--wrap=sleep 5"]
    cluster.ask(*taker, f"--output={tmp_path / 'taker.log'}")
    until(cluster, lambda: state(run) is State.preempted, PATIENCE_S)
    until(cluster, lambda: cluster.job_states().get(job(run)) == "PENDING", PATIENCE_S)
    assert len(read_metrics(run.metrics)) < STEPS
    opened.touch()
    cluster.start_now(job(run))
    request(tmp_path / "runs", steps, "train.replicate=9")
    runs = Store(tmp_path / "runs").runs()
    until(cluster, lambda: all(effective(each) is State.done for each in runs), PATIENCE_S)
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, STEPS + 1))
    assert numbers(runs[0]) == numbers(runs[1])
    assert final_weights(runs[0]) == final_weights(runs[1])


def test_the_time_limit_comes(cluster: Cluster, tmp_path: Path) -> None:
    """Every element saves, is put back and waits, the last one too; SLURM's shortest limit is a minute.

    Arrays of one, two and five side by side, as they wait most of the time.
    """
    runs = []
    for cells in (1, 2, 5):
        words = [
            f"study.name=of{cells}",
            f"train.replicate=range(0,{cells})",
            f"mesh.world_size={1 if cells == 5 else 2}",
        ]
        limits = ["train.steps=100000", "cluster.time_min=1", "cluster.grace_s=50"]
        request(tmp_path, "-m", *words, *limits)
        runs += Store(tmp_path).runs(f"of{cells}")
    assert len(runs) == 8
    until(cluster, lambda: all(state(run) is State.preempted for run in runs), PATIENCE_S, pause_s=1.0)
    until(cluster, lambda: all(cluster.job_states().get(job(run)) == "PENDING" for run in runs), PATIENCE_S)
    assert all("SIGUSR2 received; saved at step" in (run.status() or pytest.fail("no")).reason for run in runs)
    assert {effective(run) for run in runs} == {State.preempted}
