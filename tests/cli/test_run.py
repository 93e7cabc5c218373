"""`run.py` as people start it: looking, training, again, changed, in sets, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.catalog import ROOT
from harness.config.typed import load_config
from harness.store.metrics import read_metrics
from harness.store.rundir import Store
from harness.store.study import read_study
from tests.support.bad_requests import poison_torch

SMALL = ["train.steps=2", "train.warmup_steps=0", "data.seq_len=32", "model.num_layers=1", "model.dim=32"]


def run(*words: str, cwd: Path, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "run.py"), *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def poisoned(tmp_path: Path) -> dict[str, str]:
    poison_torch(tmp_path)
    return {"PYTHONPATH": str(tmp_path / "poison")}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cfg", "job", "dtype=bf16_comm"], "grad_comm: bf16"),
        (["dtype=bf16", "--cfg", "job", "-p", "dtype", "train.steps=3"], "compute: bf16"),
        (["--help"], "    hfsdp, hsdp, no_shard, optim, optim_grads, optim_grads_params"),
        (["launch.dry_run=true"], "dry run"),
        (["-m", "study=strategies", "launch.dry_run=true"], "5 cells"),
        (["-m", "engine=native,ddp", "sharding=no_shard", "launch.dry_run=true"], "2 cells"),
        (["cluster=slurm", "launch.dry_run=true", "cluster.partition=fast"], "#SBATCH"),
        (["train.seed=1", "-m", "train.steps=5,6", "launch.dry_run=true"], "train.steps=6"),
    ],
)
def test_looking_starts_nothing_writes_nothing_and_loads_no_torch(words: list[str], told: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    nowhere = tmp_path / "slurm.conf"  # another test's cluster may be up
    nowhere.touch()  # SLURM's programs wait a minute for one that is missing
    done = run(*words, cwd=here, SLURM_CONF=str(nowhere), **poisoned(tmp_path))
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
    written = [path for path in here.rglob("*") if path.is_file()]
    assert [path.name for path in written if path.name != ".store"] == []
    assert not (tmp_path / "torch-was-imported").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the parity pair was run, small; and what was printed."""
    here = tmp_path_factory.mktemp("trained")
    done = run("-m", "study=parity_pair", *SMALL, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    return here, done.stdout


def test_a_study_trains_leaves_nothing_else_and_says_what_is_next(trained: tuple[Path, str]) -> None:
    here, out = trained
    assert [p.name for p in here.iterdir()] == ["runs"]
    assert out.rstrip().splitlines()[-1] == "next: python -m harness verdict parity_pair"
    runs = Store(here / "runs").runs("parity_pair")
    assert len(runs) == 2
    for one in runs:
        assert [record["step"] for record in read_metrics(one.metrics)] == [1, 2]
        assert "train.steps=2" in one.overrides()
        closed = [
            one.path / name for name in ("capture", "step_checks", "ckpt", "attempts/0") if (one.path / name).exists()
        ]
        assert len(closed) > 2
        assert not [path for path in closed if path.stat().st_mode & 0o077], "their owner's alone"
    record = read_study(here / "runs", "parity_pair")
    assert record is not None
    assert {cell["directory"] for cell in record["cells"]} == {one.path.name for one in runs}


def test_the_same_request_again_starts_nothing(trained: tuple[Path, str]) -> None:
    here, _ = trained
    done = run("-m", "study=parity_pair", *SMALL, cwd=here, **poisoned(here.parent / "poison-again"))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^cell (\d) of 2  \S+: done", done.stdout, re.M) == ["1", "2"]
    assert len(Store(here / "runs").runs("parity_pair")) == 2


def test_its_verdict_says_the_two_are_the_same_run(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained[0])
    assert main(["verdict", "parity_pair"]) == 0
    assert re.match(r"(EQUAL|EQUIVALENT): ", capsys.readouterr().out)


def test_a_frozen_run_changed_is_another_run_of_its_study(trained: tuple[Path, str]) -> None:
    here, _ = trained
    done = run("--from", "@last", "train.seed=7", "launch.dry_run=true", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "parity_pair" in done.stdout
    assert "train.seed=7" in done.stdout
    again = run("--from", "@last", cwd=here)
    assert again.returncode == 0
    assert ": done" in again.stdout


def torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return run(*words, cwd=cwd, launcher=launcher, GLOO_SOCKET_IFNAME=interface)


def test_torchrun_starts_ranks_of_one_run(tmp_path: Path) -> None:
    done = torchrun(*SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = Store(tmp_path / "runs").runs()
    assert one.attempts() == [0]
    assert load_config(one.config()).mesh.world_size == 2
    assert [record["step"] for record in read_metrics(one.metrics)] == [1, 2]
    status = one.status()
    assert status is not None
    assert status.state.value == "done"
    again = torchrun(*SMALL, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing to run" in again.stdout
    assert one.attempts() == [0]


def test_torchrun_with_a_bad_request_is_refused_once(tmp_path: Path) -> None:
    done = torchrun("train.steps=0", "train.global_batch_size=3", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("bad request") == 1
    assert "2 problems" in done.stderr
    assert Store(tmp_path / "runs").runs() == []
