"""`harness sync STUDY`: each stored run becomes exactly one run of wandb, with its distance to the control."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.store import provenance, status
from harness.store.metrics import read_metrics
from harness.store.status import Keeper, State
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config, edit_json
from tests.parity.lab import as_study, write
from tests.support import wandb_file
from tests.support.disk import small_disk


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control, an arm that is the same, and one that trains now."""
    root = tmp_path_factory.mktemp("store")
    control, arm, moving = (write(root, each) for each in (FP32, OURS, replace(OURS, wire="bf16")))
    as_study(root, {control: None, arm: control, moving: control}, "Is it the same?")
    for run in (control, arm, moving):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
        edit_json(run / "summary.json", status="done", step=FP32.steps)
        edit_config(run, "study", question="Is it the same?")
    status.note(moving, state=State.running, keeper=Keeper.slurm)
    return root


def test_a_damaged_run_is_named_and_hides_no_other(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "runs")
    found = (tmp_path / "runs").glob("lab/*/status.json")
    damaged, other, _ = sorted(found, key=lambda path: "running" in path.read_text())
    damaged.write_text("{")
    shutil.rmtree(other.parent)
    assert main(["sync", "lab", "--offline", "--root", str(tmp_path / "runs")]) == 2
    out, err = capsys.readouterr()
    assert ": left out\n" in out
    assert "left alone, it is running" in out
    assert f"{damaged} is not valid JSON" in err


def test_nothing_is_written_offline_beside_an_archive(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb would write into the folder for temporary files, and say nothing that we could pass on."""
    with small_disk(tmp_path, 4) as disk:
        shutil.copytree(store, disk, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert main(["sync", "lab", "--offline", "--root", str(disk)]) == 2
        out, err = capsys.readouterr()
    assert out.count(": left out\n") == 2
    assert "is not writable, and what wandb keeps offline lies there" in err


def test_a_study_is_sent_with_its_verdicts(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):  # the second time replaces what the first wrote
        assert main(["sync", "lab", "--root", str(store)]) == 0
    assert capsys.readouterr().out.count("left alone, it is running") == 2
    record = json.loads((store / "lab" / "study.json").read_text())
    paths = [store / "lab" / cell["directory"] for cell in record["cells"]]
    found = [wandb_file.records(wandb_file.only_file(path)) for path in paths[:2]]
    assert [wandb_file.run_of(each).job_type for each in found] == ["control", "arm"]
    assert [wandb_file.run_of(each).notes for each in found] == ["Is it the same?"] * 2
    summary = wandb_file.summary(found[1])
    assert summary["parity/verdict"] in ("EQUAL", "EQUIVALENT")
    assert 0 < summary["parity/margin"] < 1
    lines = [read_metrics(path / "metrics.jsonl") for path in paths[:2]]
    for row, held, arm in zip(wandb_file.history(found[1]), *lines, strict=True):
        assert row["train/loss"] == arm["loss"]
        assert row["parity/loss_difference"] == (arm["loss"] - held["loss"]) / abs(held["loss"])
        assert abs(row["parity/loss_difference"]) <= row["parity/loss_allowed"] == -row["parity/loss_allowed_below"]
        assert math.isclose(row["parity/grad_norm_ratio"], arm["grad_norm"] / held["grad_norm"])
    assert not (paths[2] / "wandb").exists()


@pytest.mark.parametrize(
    ("mode", "told"), [("", "neither WANDB_API_KEY nor"), ("disabled", "sends nothing"), ("so so", "is none of online")]
)
def test_what_cannot_be_sent_is_refused_before_it_begins(
    mode: str, told: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "WANDB_MODE": mode,
        "NETRC": "/nowhere",
        "WANDB_API_KEY": "",
        "WANDB_CONFIG_DIR": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["sync", "lab", "--root", str(store)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sync", "lab", "--offline"], ["wandb", "push", "lab", "--offline"]])
def test_what_wandb_raises_is_a_sentence(
    words: list[str], store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No network, a key that the server refuses, a name it does not take: each ended in a traceback."""

    def init(**_: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("wandb.init", init)
    assert main([*words, "--root", str(store)]) == 2
    assert "lab: wandb failed: ConnectionError: no route to host" in capsys.readouterr().err
