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
from tests.support.mutants import kills


def make(root, *overrides):
    return make_cell(root, "cluster.backend=slurm", *overrides)


START = Decision(Action.start, "new")


def batch_of(root, *overrides, count=2):
    pairs = ((make(root, *overrides), START),) * count
    return Batch(pairs, "ab", root, root / ".snapshots" / "c0de")


def text_of(root, *overrides, count=2):
    return batch_of(root, *overrides, count=count).script()


def test_submitit_makes_scripts_by_what_is_called_here():
    """Its maker of scripts is private: a release in which it takes other words fails here, before any user."""
    taken = inspect.signature(_make_sbatch_string).parameters
    made = Batch(((make("/runs"), START),) * 2, "ab", Path("/runs"), Path("/code"))
    assert {"command", "folder", *made.parameters} <= taken.keys()


def test_one_array_for_each_shape(tmp_path):
    cells = [make(tmp_path, f"train.replicate={i}") for i in range(3)]
    cells += [make(tmp_path, "mesh.world_size=4"), make(tmp_path, "train.replicate=9")]
    found = batches(Store(tmp_path), [(cell, START) for cell in cells], code=tmp_path, limit=9)
    assert [len(batch.wanted) for batch in found] == [4, 1]


def test_what_the_cell_says_reaches_sbatch(tmp_path):
    text = text_of(
        tmp_path,
        "mesh.world_size=8",
        "cluster.nodes=2",
        "cluster.gpus_per_node=4",
        "cluster.threads_per_rank=3",
        "cluster.mem_gb=1.5",
        "cluster.partition=big",
        "cluster.account=me",
        "cluster.qos=low",
        "cluster.time_min=90",
        "cluster.grace_s=77",
        "cluster.setup=[module load x]",
        "cluster.additional.network=sharp",
        "cluster.additional.exclude='bad1,bad[3-4]'",
    )
    wanted = {
        "array=0-1%2", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=3", "mem=1536M",
        "partition=big", "account=me", "qos=low", "time=90", "signal=USR2@77", "network=sharp", "requeue",
        "open-mode=append", "job-name=adhoc-ab", "exclude='bad1,bad[3-4]'",
    }  # fmt: skip
    found = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert wanted <= found
    assert "\nmodule load x\n" in text
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    words = shlex.split(srun)
    assert "--kill-on-bad-exit=1" in words
    assert "--cpus-per-task=3" in words


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
    cuda = ["cluster.device=cuda", "cluster.gpus_per_node=2"]
    found = [line for line in text_of(tmp_path, *cuda, *overrides.split()).splitlines() if "--network" in line]
    assert found == ([f"#SBATCH --network={network}"] if network else [])


def test_a_little_memory_is_not_all_of_it(tmp_path):
    """--mem=0 is a whole node's."""
    assert "#SBATCH --mem=1M\n" in text_of(tmp_path, "cluster.mem_gb=1e-9")


def test_what_the_cell_leaves_open_is_left_to_slurm(tmp_path):
    text = text_of(tmp_path, count=1)
    for word in ("--array", "--gpus", "--mem", "--partition", "--account", "--qos", "--wckey"):
        assert word not in text


@pytest.mark.parametrize("name", ["with space", "dollar$HOME", "semi;colon", "umläut", "(b)"])
def test_nasty_roots_are_one_word(tmp_path, name):
    text = text_of(tmp_path / name)
    (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(output.removeprefix("#SBATCH --output="))[0].startswith(str(tmp_path / name))
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert shlex.split(srun)[-1] == str(tmp_path / name / "adhoc" / ".submit" / "ab")


def test_nothing_that_sbatch_believes_before_the_script_reaches_it():
    """A limit, an account, the name that a job is found by; counts of a surrounding job."""
    ours = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "here", "HOME": "/home/me"}
    others = ("SBATCH_JOB_NAME", "SBATCH_ACCOUNT", "SBATCH_TIMELIMIT", "SLURM_MEM_PER_NODE", "SLURMD_NODENAME", "RANK")
    assert submission.sbatch_environment(ours | dict.fromkeys(others, "mine")) == ours


@kills("slurm", "outvoted", "Variables come before the script")
def test_a_variable_that_outvotes_the_script_is_found(monkeypatch):
    monkeypatch.setattr(submission, "OF_SLURM", submission.OF_SLURM[:-1])
    with pytest.raises(AssertionError):
        test_nothing_that_sbatch_believes_before_the_script_reaches_it()


def test_more_cells_than_an_array_holds_are_several_arrays(tmp_path):
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


def test_flags_words_for_srun_and_what_comes_after(tmp_path):
    text = text_of(
        tmp_path,
        "cluster.flags=[exclusive]",
        "cluster.srun_args=[--mpi=none]",
        "cluster.teardown=[rm -rf /scratch/x]",
        "cluster.array_parallelism=3",
        count=5,
    )
    assert "\n#SBATCH --exclusive\n" in text
    assert "\n#SBATCH --array=0-4%3\n" in text
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert "--mpi=none" in shlex.split(srun)
    assert text.endswith("ranks=$?\nrm -rf /scratch/x\nexit $ranks")


def test_the_job_ends_as_its_ranks_did_whatever_is_done_after(tmp_path):
    """bash itself runs the script, with a srun that fails."""
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 75\n")
    (tmp_path / "srun").chmod(0o755)
    text = text_of(tmp_path, "cluster.teardown=[touch 'after it']")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 75
    assert (tmp_path / "after it").exists()


def test_a_preview_shows_everything_and_writes_scripts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.slurm.scheduler.probe", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    root = tmp_path / "none yet"
    cells = [make(root, "train.replicate=1"), make_cell(root, "train.replicate=2")]
    text = preview(cells)
    assert "2 cells" in text
    for cell in cells:
        assert f"{cell.name}-{cell.signature[:8]}\n    start: new" in text
    assert "#SBATCH --nodes=1" in text
    assert "harness.worker" in text
    assert "OMP_NUM_THREADS=1" in text
    (script,) = (path for path in root.rglob("*") if path.is_file() and path.name != ".store")
    assert script.read_text() in text
    assert str(script) in text
    assert preview(cells) == text


def test_processors_and_devices_are_asked_for_as_a_site_knows_them(tmp_path):
    text = text_of(
        tmp_path,
        "cluster.device=cuda",
        "cluster.additional.gres=gpu:h100:2",
        "cluster.cpus_per_rank=12",
        "cluster.mem_gb=0",
    )
    assert "#SBATCH --gres=gpu:h100:2\n" in text
    assert "gpus-per-node" not in text
    assert "#SBATCH --cpus-per-task=12\n" in text
    assert "--cpus-per-task=12" in shlex.split(next(line for line in text.splitlines() if line.startswith("srun")))
    assert "#SBATCH --mem=0\n" in text


def test_a_rank_on_cuda_is_given_more_than_the_core_that_computes(tmp_path):
    assert "--cpus-per-task=1\n" in text_of(tmp_path)
    assert "--cpus-per-task=4\n" in text_of(tmp_path, "cluster.device=cuda")
    assert "--cpus-per-task=6\n" in text_of(tmp_path, "cluster.device=cuda", "cluster.threads_per_rank=6")
