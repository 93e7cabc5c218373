"""A run that is stopped and gone on with by the commands of docs/checkpoints.md, and another that begins from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.store import checksums
from harness.store.rundir import RunDir, Store
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("model.dim=32", "model.num_layers=2", "model.ffn_dim=48", "data=synthetic", "data.seq_len=16"),
    *("train.steps=6", "train.global_batch_size=8", "train.microbatch_size=2", "numerics=exact", "sharding=optim"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An exact run of two ranks, done."""
    root = tmp_path_factory.mktemp("store") / "runs"
    done = run_program([str(ROOT / "run.py"), *SMALL, f"launch.root={root}"])
    assert done.returncode == 0, done.stdout + done.stderr
    return Store(root).find("@last")


def test_an_interruption_changes_no_bit(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.path.parents[1]
    again = [str(ROOT / "run.py"), "--from", str(run.path), "study.name=again", "launch.preempt_at=3"]
    codes = [run_program(again).returncode for _ in range(2)]
    assert codes == [75, 0]
    (resumed,) = Store(root).runs("again")
    assert main(["compare", str(resumed.path), str(run.path), "--root", str(root)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("EQUAL")
    assert "resumed on the same layout" in " ".join(said.split())
    restored = json.loads(resumed.summary.read_text())["restored"]
    assert (restored["step"], restored["wrong"]) == (3, [])
    assert checksums.condition(resumed.path).startswith("whole, ")


def test_a_run_begins_from_another_runs_checkpoint(run: RunDir, tmp_path: Path) -> None:
    done = run_program(
        [
            *(str(ROOT / "run.py"), *SMALL[:5], "train.steps=8", "train.global_batch_size=8"),
            *("train.microbatch_size=2", "engine=fsdp2", "sharding=optim_grads_params"),
            *(f"ckpt.load={run.path}", f"launch.root={tmp_path / 'runs'}"),
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begun = json.loads(Store(tmp_path / "runs").find("@last").summary.read_text())
    assert (begun["restored"]["step"], begun["restored"]["wrong"], begun["steps"]) == (6, [], 8)
    saved = json.loads(run.summary.read_text())
    assert begun["initial_weights"] == saved["initial_weights"]
    assert begun["final_weights"] != saved["final_weights"]
