"""`srun python run.py`: each task is one rank of the run that rank 0 composes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.catalog import ROOT
from harness.config.typed import load_config
from harness.store import provenance
from harness.store.metrics import read_metrics
from harness.store.rundir import Store
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
RUN = [sys.executable, str(ROOT / "run.py")]
SMALL = ["train.warmup_steps=0", "data.seq_len=32", "model.num_layers=1", "model.dim=32"]


def typed(cluster: Cluster, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    how = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command, env=cluster.environment, cwd=cwd, check=False, **how)


def srun(cluster: Cluster, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed(cluster, cwd, "srun", "--nodes=2", "--ntasks=2", *RUN, *words)


def test_tasks_on_two_nodes_are_ranks_of_one_run(cluster: Cluster, tmp_path: Path) -> None:
    done = srun(cluster, tmp_path, "train.steps=2", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = Store(tmp_path / "runs").runs()
    assert run.attempts() == [0]
    assert load_config(run.config()).mesh.world_size == 2
    assert [record["step"] for record in read_metrics(run.metrics)] == [1, 2]
    status = run.status()
    assert status is not None
    assert (status.state.value, status.keeper.value) == ("done", "slurm")


def test_a_bad_request_ends_every_task_with_one_message(cluster: Cluster, tmp_path: Path) -> None:
    done = srun(cluster, tmp_path, "train.global_batch_size=3")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("bad request") == 1
    assert Store(tmp_path / "runs").runs() == []


@pytest.mark.full
def test_a_timed_study_over_two_nodes_is_one_step_after_another(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes of one allocation, both of them, for every arm; outside of one the study is refused."""
    words = ["engine=native,ddp", "sharding=no_shard", "measure=bench", "cluster=slurm", "cluster.nodes=2", *SMALL]
    command = [*RUN, "-m", *words, "train.steps=6", "measure.warmup_steps=3"]
    refused = typed(cluster, tmp_path, *command)
    assert refused.returncode == 2
    assert "salloc" in refused.stderr
    done = typed(cluster, tmp_path, "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = Store(tmp_path / "runs").runs()
    assert len(runs) == 2
    for run in runs:
        status = run.status()
        assert status is not None
        assert status.state.value == "done"
        assert len(provenance.read(run.path)["hosts"]) == 2
        assert "SLURM_JOB_NODELIST" in provenance.read(run.path)["environment"]
    jobs = {provenance.read(run.path)["environment"]["SLURM_JOB_ID"] for run in runs}
    assert len(jobs) == 1
    assert "harness bench" in done.stdout
