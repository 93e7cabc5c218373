"""A run that is stopped and gone on with by the commands of docs/checkpoints.md; `export` and `import`."""

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
    assert checksums.condition(resumed.path).startswith("complete, ")
    (resumed.path / "attempts/0").rename(resumed.path / "away")
    assert checksums.condition(resumed.path).startswith("damaged: attempts/ is truncated: 1 of 2 are there")


def test_a_run_is_exported_and_begun_from(run: RunDir, tmp_path: Path) -> None:
    store = str(run.path.parents[1])
    assert main(["export", str(run.path), str(tmp_path / "hf"), "--format", "hf", "--root", store]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "begin"), "--format", "hf"]) == 0
    done = run_program(
        [
            *(str(ROOT / "run.py"), *SMALL[:5], "train.steps=2", "train.global_batch_size=4"),
            *("train.microbatch_size=2", "mesh=one", "launch.inline=true"),
            *(f"ckpt.load={tmp_path / 'begin'}", f"launch.root={tmp_path / 'runs'}"),
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begun = Store(tmp_path / "runs").find("@last")
    condition = json.loads(begun.summary.read_text())
    assert condition["initial_weights"] == json.loads(run.summary.read_text())["final_weights"]
    assert condition["restored"]["step"] == 0
