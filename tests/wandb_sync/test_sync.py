"""`harness sync STUDY`: each stored run becomes exactly one run of wandb, with its distance to the control."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.store import provenance, status
from harness.store.metrics import encode, read_metrics
from harness.store.status import Keeper, State
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config, edit_json
from tests.parity.lab import as_study, write
from tests.support import wandb_file, wandb_stand_in


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


def _runs(store: Path, root: Path) -> tuple[Path, Path]:
    """A copy's control and arm; what trains is done, too, so that the record decides."""
    shutil.copytree(store, root)
    record = json.loads((root / "lab" / "study.json").read_text())
    control, arm, _ = (root / "lab" / cell["directory"] for cell in record["cells"])
    for run in (control, arm):
        status.note(run, state=State.done)
    return control, arm


def test_a_record_that_is_damaged_is_named_and_what_an_earlier_copy_made_stays(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_stand_in.put_in_place(monkeypatch)
    control, arm = _runs(store, tmp_path / "runs")
    words = ["sync", "lab", "--offline", "--root", str(tmp_path / "runs")]
    assert main(words) == 0
    whole = wandb_stand_in.sent(arm)
    assert len(whole) == 1
    for run, gone in ((control, "grad_norm"), (arm, "loss")):  # what is missing has no distance
        records = read_metrics(run / "metrics.jsonl")
        del records[1][gone]
        records[2][gone] = None
        (run / "metrics.jsonl").write_text("".join(encode(each) + "\n" for each in records))
    assert main(words) == 0
    lines = (arm / "metrics.jsonl").read_text().splitlines(keepends=True)
    (arm / "metrics.jsonl").write_text("".join([lines[0], lines[1][:40] + "\n", *lines[2:]]))
    capsys.readouterr()
    assert main(words) == 2
    assert "is not a record" in capsys.readouterr().err
    assert whole[0] in wandb_stand_in.sent(arm)
    assert len(wandb_stand_in.sent(control)) == 1


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
    ("words", "mode", "told"),
    [
        ("sync lab", "", "No API key configured"),
        ("sync lab", "disabled", "sends nothing"),
        ("sync lab", "so so", "is none of disabled"),
        ("wandb push lab", "", "No API key configured"),
        ("wandb push nope", "offline", "no study of this name was run"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_begins(
    words: str, mode: str, told: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WANDB_MODE": mode, "WANDB_API_KEY": "", "NETRC": "/no", "WANDB_CONFIG_DIR": "/no"}.items():
        monkeypatch.setenv(name, value)
    assert main([*words.split(), "--root", str(store)]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert not said.out
    assert not (store / "nope").exists()


@pytest.mark.parametrize("words", [["sync", "lab", "--offline"], ["wandb", "push", "lab", "--offline"]])
def test_what_wandb_raises_is_a_sentence(
    words: list[str], store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No network, a key that the server refuses, a name it does not take: each ended in a traceback."""

    def init(**_: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("wandb.init", init)
    assert main([*words, "--root", str(store)]) == 2
    told = capsys.readouterr().err
    assert "lab: wandb failed: " in told
    assert "ConnectionError: no route to host" in told
