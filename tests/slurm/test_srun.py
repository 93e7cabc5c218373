"""`srun python run.py`: each task is one rank of the run that rank 0 composes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.catalog import ROOT
from harness.config.compose import load_config
from harness.store.metrics import read_metrics
from harness.store.rundir import Store
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
SMALL = ["train.steps=2", "train.warmup_steps=0", "data.seq_len=32", "model.num_layers=1", "model.dim=32"]


def srun(cluster: Cluster, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["srun", "--nodes=2", "--ntasks=2", "--chdir", str(cwd), sys.executable, str(ROOT / "run.py"), *words]
    return subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=240, check=False)


def test_tasks_on_two_nodes_are_ranks_of_one_run(cluster: Cluster, tmp_path: Path) -> None:
    done = srun(cluster, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = Store(tmp_path / "runs").runs()
    assert run.attempts() == [0]
    assert load_config(run.config()).mesh.world_size == 2
    assert [record["step"] for record in read_metrics(run.metrics)] == [1, 2]
    status = run.status()
    assert status is not None
    assert (status.state.value, status.keeper.value) == ("done", "slurm")


def test_a_bad_request_ends_every_task_with_one_message(cluster: Cluster, tmp_path: Path) -> None:
    done = srun(cluster, "train.global_batch_size=3", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("bad request") == 1
    assert Store(tmp_path / "runs").runs() == []
