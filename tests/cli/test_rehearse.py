"""`rehearse`: a run that survives, one that does not, another layout, and what is refused; `export` and `import`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from harness.cli.main import main
from harness.store import checksums
from harness.store.files import Lock
from harness.store.rundir import RunDir, Store
from harness.study import rehearse as rehearsal
from tests.support.disk import small_disk
from tests.support.programs import run_command, run_program

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("model.dim=32", "model.num_layers=2", "model.ffn_dim=48", "data=synthetic", "data.seq_len=16"),
    *("train.steps=6", "train.global_batch_size=8", "train.microbatch_size=2", "numerics=exact", "sharding=optim"),
)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Programs that these verbs start are forks of a process that has their imports."""
    here = SimpleNamespace(run=run_command, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with mock.patch("harness.study.rehearse.subprocess", here), mock.patch("harness.cli.convert.subprocess", here):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An exact run of two ranks, done."""
    root = tmp_path_factory.mktemp("store") / "runs"
    done = run_program([str(ROOT / "run.py"), *SMALL, f"launch.root={root}"])
    assert done.returncode == 0, done.stdout + done.stderr
    return Store(root).find("@last")


def rehearse(run: RunDir, *words: str) -> int:
    return main(["rehearse", str(run.path), "--root", str(run.path.parents[1]), *words])


@pytest.fixture(scope="module")
def rehearsed(run: RunDir) -> dict[str, Any]:
    """What was told of an interruption after step 3."""
    condition = io.StringIO()
    with contextlib.redirect_stdout(condition):
        assert rehearse(run, "--preempt-at", "3", "--json") == 0
    found: dict[str, Any] = json.loads(condition.getvalue())
    return found


def test_the_same_layout_keeps_every_bit(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["equal"]
    assert rehearsed["steps"] == 6
    assert rehearsed["numbers"] >= 6 * 6


def test_a_resumed_run_lists_what_both_attempts_recorded(rehearsed: dict[str, Any]) -> None:
    resumed = Path(rehearsed["resumed"])
    assert checksums.condition(resumed).startswith("complete, ")
    (resumed / "attempts/0").rename(resumed / "away")
    assert checksums.condition(resumed).startswith("damaged: attempts/ is truncated: 1 of 2 are there")
    (resumed / "away").rename(resumed / "attempts/0")


def test_another_layout_keeps_every_bit_under_exact(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--as", "sharding=hfsdp", "mesh=two_by_two")
    assert rehearse(run, "--preempt-at", "2", *words) == 0
    assert capsys.readouterr().out.startswith("EQUAL: stopped after step 2 and resumed")


def test_a_record_that_differs_is_told(
    run: RunDir,
    rehearsed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same rehearsal again, whose runs are those that were made."""
    made = tmp_path / "made"
    shutil.copytree(Path(rehearsed["resumed"]).parents[1], made)
    monkeypatch.setattr(rehearsal, "_call", lambda _, store, __: shutil.copytree(made, store, dirs_exist_ok=True))
    text = run.metrics.read_text()
    lines = text.splitlines()
    fifth = json.loads(lines[4])
    fifth["loss"] += 1e-15 * fifth["loss"]
    fifth["loss"] = float.fromhex(float(fifth["loss"]).hex())
    lines[4] = json.dumps(fifth | {"loss": fifth["loss"] * (1 + 2**-52)})
    run.metrics.write_text("\n".join(lines) + "\n")
    checksums.renew(run.path)
    try:
        assert rehearse(run, "--preempt-at", "3") == 1
        assert capsys.readouterr().out.startswith("DIFFERENT: 1 difference, the first: step 5: loss is ")
        summary = run.summary.read_text()
        run.summary.write_text('{"status": "done"}')
        checksums.renew(run.path)
        assert rehearse(run, "--preempt-at", "3") == 2
        assert "summary.json is damaged: initial_weights is missing" in capsys.readouterr().err
        run.summary.write_text(summary)
    finally:
        run.metrics.write_text(text)
        checksums.renew(run.path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--preempt-at", "6"), "is no step before the last of 6"),
        (("--preempt-at", "0"), "valid: 1 to 5"),
        (("--preempt-at", "3", "--as", "shardin=optim"), "did you mean sharding"),
        (("another", "--preempt-at", "3"), "takes 1 RUN, not 2"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert rehearse(run, *words) == 2
    assert says in capsys.readouterr().err


def test_words_stand_in_any_order(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """`--as` takes words until the next option, and here the run's is among them."""
    words = ["rehearse", "--preempt-at", "6", "--as", "mesh=one", str(run.path), "--root", str(run.path.parents[1])]
    assert main(words) == 2
    assert "is no step before the last of 6" in capsys.readouterr().err


def test_one_at_a_time_and_only_where_there_is_room(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path, 1) as disk:
        words = ["rehearse", str(run.path), "--preempt-at", "4", "--root", str(disk)]
        assert main(words) == 2
        condition = capsys.readouterr().err
        assert f"--root {disk}: has " in condition
        assert "what would be trained keeps at least" in condition
        (lock,) = (disk / ".rehearsals").glob("*.lock")
        with Lock.acquire(lock) or pytest.fail("it is free again"):
            assert main(words) == 69
            assert "another process rehearses" in capsys.readouterr().err


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
