"""Batch scripts and arrays, without any SLURM."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from submitit.slurm.slurm import _make_sbatch_string

from harness.launch.opening import Action, Decision
from harness.launch.slurm import submission
from harness.launch.slurm.submission import Batch, batches
from harness.launch.submit import preview
from harness.store.rundir import Store
from tests.launch.cells import make_cell
from tests.support.mutants import finds


def make(root, *overrides):
    return make_cell(root, "cluster.backend=slurm", *overrides)


START = Decision(Action.start, "new")


def text_of(root, *overrides, count=2):
    return Batch(((make(root, *overrides), START),) * count, "ab", root, root / ".snapshots" / "c0de").script()


def test_submitit_makes_scripts_by_what_is_called_here():
    """Its maker of scripts is private: a release in which it takes other words fails here, before any user."""
    taken = inspect.signature(_make_sbatch_string).parameters
    made = Batch(((make("/runs"), START),) * 2, "ab", Path("/runs"), Path("/code"))
    assert {"command", "folder", *made.parameters} <= taken.keys()


CUDA = "cluster.device=cuda"
SAID = {
    "mesh.world_size=8 cluster.nodes=2": ("nodes=2", "ntasks-per-node=4", "array=0-1%2", "requeue", "open-mode=append"),
    "cluster.gpus_per_node=4": ("gpus-per-node=4", "job-name=adhoc-ab"),
    "cluster.threads_per_rank=3": ("cpus-per-task=3", "srun --cpus-per-task=3", "srun --kill-on-bad-exit=1"),
    "cluster.cpus_per_rank=12": ("cpus-per-task=12", "srun --cpus-per-task=12"),
    "": ("cpus-per-task=1",),
    CUDA: ("cpus-per-task=4",),
    f"{CUDA} cluster.threads_per_rank=6": ("cpus-per-task=6",),
    "cluster.mem_gb=1.5": ("mem=1536M",),
    "cluster.mem_gb=1e-9": ("mem=1M",),
    "cluster.mem_gb=0": ("mem=0",),
    "cluster.partition=big cluster.account=me cluster.qos=low": ("partition=big", "account=me", "qos=low"),
    "cluster.time_min=90 cluster.grace_s=77": ("time=90", "signal=USR2@77"),
    "cluster.additional.network=sharp": ("network=sharp",),
    "cluster.additional.exclude='bad1,bad[3-4]'": ("exclude='bad1,bad[3-4]'",),
    "cluster.additional.gres=gpu:h100:2": ("gres=gpu:h100:2",),
    "cluster.flags=[exclusive] cluster.array_parallelism=1": ("exclusive", "array=0-1%1"),
    "cluster.srun_args=[--mpi=none]": ("srun --mpi=none",),
}


@pytest.mark.parametrize("asked", SAID)
def test_what_the_cell_says_reaches_sbatch_and_the_rest_is_left_to_slurm(tmp_path, asked):
    text = text_of(tmp_path, *asked.split())
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    found = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    found |= {f"srun {word}" for word in shlex.split(srun)}
    assert set(SAID[asked]) <= found
    for word in ("gpus-per-node", "mem", "partition", "account", "qos", "wckey", "network"):
        assert any(each.startswith(word) for each in SAID[asked]) or f"#SBATCH --{word}" not in text


@pytest.mark.parametrize("name", ["with space", "dollar$HOME", "semi;colon", "umläut", "(b)"])
def test_nasty_roots_are_one_word_and_what_is_done_before_and_after_stands_around_the_ranks(tmp_path, name):
    words = ("cluster.setup=[module load x]", "cluster.teardown=[rm -rf /scratch/x]")
    text = text_of(tmp_path / name, *words, count=1)
    assert "\nmodule load x\n" in text
    assert "--array" not in text
    assert text.endswith("ranks=$?\nrm -rf /scratch/x\nexit $ranks")
    (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(output.removeprefix("#SBATCH --output="))[0].startswith(str(tmp_path / name))
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert shlex.split(srun)[-1] == str(tmp_path / name / "adhoc" / ".submit" / "ab")


@pytest.mark.parametrize(
    ("overrides", "network"),
    [
        ("", None),
        ("sharp.group=dp", "sharp"),
        ("sharp.group=dp sharp.infiniband=false", None),
        ("sharp.group=dp cluster.sharp_network=null", None),
        ("sharp.group=dp cluster.sharp_network=sharp:2", "sharp:2"),
        ("sharp.group=dp cluster.additional.network=mine", "mine"),
        ("sharp.group=dp cluster.device=cpu", None),
    ],
)
def test_a_cell_that_wants_the_switches_asks_the_scheduler_for_them(tmp_path, overrides, network):
    found = [
        line
        for line in text_of(tmp_path, CUDA, "cluster.gpus_per_node=2", *overrides.split()).splitlines()
        if "--network" in line
    ]
    assert found == ([f"#SBATCH --network={network}"] if network else [])


def test_nothing_that_sbatch_believes_before_the_script_reaches_it():
    """A limit, an account, the name that a job is found by; counts of a surrounding job."""
    ours = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "here", "HOME": "/home/me"}
    others = ("SBATCH_JOB_NAME", "SBATCH_ACCOUNT", "SBATCH_TIMELIMIT", "SLURM_MEM_PER_NODE", "SLURMD_NODENAME", "RANK")
    assert submission.sbatch_environment(ours | dict.fromkeys(others, "mine")) == ours


def test_each_shape_is_an_array_and_more_cells_than_one_holds_are_several(tmp_path):
    shapes = [make(tmp_path), make(tmp_path, "mesh.world_size=4"), make(tmp_path, "train.replicate=9")]
    found = batches(Store(tmp_path), [(cell, START) for cell in shapes], code=tmp_path, limit=9)
    assert [len(batch.wanted) for batch in found] == [2, 1]
    cells = [make(tmp_path, f"train.replicate={i}") for i in range(7)]
    pairs = [(cell, START) for cell in cells]
    found = list(batches(Store(tmp_path), pairs, code=tmp_path, limit=3))
    assert [[cell for cell, _ in batch.wanted] for batch in found] == [cells[:3], cells[3:6], cells[6:]]
    assert len({batch.token for batch in found}) == 3
    again = list(batches(Store(tmp_path), pairs, code=tmp_path, limit=3))
    assert [batch.token for batch in again] == [batch.token for batch in found]
    Store(tmp_path).create(cells[0]).new_attempt()
    later = next(batches(Store(tmp_path), pairs, code=tmp_path, limit=3))
    assert later.token != found[0].token, "another attempt is another submission"


def test_the_job_ends_as_its_ranks_did_whatever_is_done_after(tmp_path):
    """bash itself runs the script, with a srun that fails."""
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 75\n")
    (tmp_path / "srun").chmod(0o755)
    text = text_of(tmp_path, "cluster.teardown=[touch 'after it']")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 75
    assert (tmp_path / "after it").exists()


def test_a_preview_shows_everything_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.slurm.scheduler.probe", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    root = tmp_path / "none yet"
    cells = [make(root, "train.replicate=1"), make_cell(root, "train.replicate=2")]
    text = preview(cells)
    assert "2 cells" in text
    for cell in cells:
        assert f"{cell.name}-{cell.signature[:8]}\n    start: new" in text
    assert "#SBATCH --nodes=1" in text
    assert "OMP_NUM_THREADS=1" in text
    assert preview(cells) == text
    assert not root.exists()


test_a_mutant_is_found = finds(
    "slurm",
    test_nothing_that_sbatch_believes_before_the_script_reaches_it="""
        outvoted: Variables come before the script
            launch.slurm.submission.OF_SLURM: was[:-1]
    """,
)
