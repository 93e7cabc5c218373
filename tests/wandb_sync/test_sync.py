"""`harness sync STUDY`: each stored run becomes exactly one run of wandb, with its distance to the control."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.store import provenance, status
from harness.store.metrics import encode, read_metrics
from harness.store.rundir import RunDir
from harness.store.status import Keeper, State
from harness.wandb_sync import sync
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_config, edit_json
from tests.parity.lab import as_study, write
from tests.support import wandb_file, wandb_stand_in
from tests.support.disk import small_disk
from tests.support.mutants import Slip, kills


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


def _runs(store: Path, root: Path) -> tuple[Path, Path]:
    """A copy's control and arm; what trains is done, too, so that the record decides."""
    shutil.copytree(store, root)
    record = json.loads((root / "lab" / "study.json").read_text())
    control, arm, _ = (root / "lab" / cell["directory"] for cell in record["cells"])
    for run in (control, arm):
        status.note(run, state=State.done)
    return control, arm


ODD = {
    "steps again": (lambda lines: [*lines[:4], *lines[2:]], "line 5 is step 3 after step 4; wandb cannot keep that"),
    "no such step": (
        lambda lines: [re.sub('"step": 1', '"step": -1', lines[0]), *lines[1:]],
        "line 1 is step -1 after step 0",
    ),
    "half a line": (lambda lines: [lines[0], lines[1][:40] + "\n", *lines[2:]], "line 2 is not a record"),
}
"""What a record may look like that somebody edited or cut: an edit of its lines, and what is told."""


def _odd_is_told(odd: str, store: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, told = ODD[odd]
    control, arm = _runs(store, root)
    assert main(["sync", "lab", "--offline", "--root", str(root)]) == 0
    whole = wandb_stand_in.sent(arm)
    assert len(whole) == 1
    lines = (arm / "metrics.jsonl").read_text().splitlines(keepends=True)
    (arm / "metrics.jsonl").write_text("".join(edit(lines)))
    capsys.readouterr()
    assert main(["sync", "lab", "--offline", "--root", str(root)]) == 2
    out, err = capsys.readouterr()
    assert f"{arm.name}: left out\n" in out
    assert err.count(told) == 1
    assert wandb_stand_in.sent(arm) == whole, "what an earlier copy made of the whole record stays"
    assert len(wandb_stand_in.sent(control)) == 1


@pytest.mark.parametrize("odd", ODD)
def test_a_record_that_wandb_could_not_keep_is_not_begun(
    odd: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb warned, dropped the steps and was said to have been sent; half a run took the place of a whole one."""
    wandb_stand_in.put_in_place(monkeypatch)
    _odd_is_told(odd, store, tmp_path / "runs", capsys)


SYNC_SLIPS = {
    "steps again": Slip(sync, "_last_step", "if not last < step <= LAST_STEP:", "if False:",
                        "steps that are told twice are sent, and wandb drops them"),
}  # fmt: skip


@pytest.mark.parametrize("odd", [pytest.param(odd, marks=kills("The wandb copy", f"sync, {odd}", slip.breaks))
                                 for odd, slip in SYNC_SLIPS.items()])  # fmt: skip
def test_a_slip_in_what_is_sent_is_found(
    odd: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slip = SYNC_SLIPS[odd]
    wandb_stand_in.put_in_place(monkeypatch)
    monkeypatch.setattr(slip.owner, slip.name, slip.made())
    with pytest.raises(AssertionError):
        _odd_is_told(odd, store, tmp_path / "runs", capsys)


def test_an_arm_is_sent_where_its_control_cannot_be_read(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each arm was left out, and the same line of the same file told once for each."""
    wandb_stand_in.put_in_place(monkeypatch)
    control, arm = _runs(store, tmp_path / "runs")
    (control / "metrics.jsonl").write_text("x\n" + (control / "metrics.jsonl").read_text())
    assert main(["sync", "lab", "--offline", "--root", str(tmp_path / "runs")]) == 2
    out, err = capsys.readouterr()
    assert f"{control.name}: left out\n" in out
    assert f"{arm.name}: written, without its distance to the control\n" in out
    assert err.count("metrics.jsonl, line 1 is not a record") == 1
    assert len(wandb_stand_in.sent(arm)) == 1


def test_losses_that_are_missing_have_no_distance(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_stand_in.put_in_place(monkeypatch)
    control, arm = _runs(store, tmp_path / "runs")
    for run, gone in ((control, "grad_norm"), (arm, "loss")):
        records = read_metrics(run / "metrics.jsonl")
        del records[1][gone]
        records[2][gone] = None
        (run / "metrics.jsonl").write_text("".join(encode(each) + "\n" for each in records))
    assert main(["sync", "lab", "--offline", "--root", str(tmp_path / "runs")]) == 0, capsys.readouterr().err
    assert len(wandb_stand_in.sent(arm)) == 1


def test_a_run_that_wandb_does_not_take_hides_no_other_offline(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_stand_in.put_in_place(monkeypatch)
    control, arm = _runs(store, tmp_path / "runs")

    def init(**said: Any) -> wandb_stand_in.StandIn:
        if said["job_type"] == "control":
            raise ValueError("invalid project name")
        return wandb_stand_in.StandIn(**said)

    monkeypatch.setattr("wandb.init", init)
    assert main(["sync", "lab", "--offline", "--root", str(tmp_path / "runs")]) == 2
    out, err = capsys.readouterr()
    assert f"{control.name}: left out\n" in out
    assert f"wandb failed: {RunDir(control).name}: ValueError: invalid project name" in err
    assert len(wandb_stand_in.sent(arm)) == 1


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
    told = capsys.readouterr().err
    assert "lab: wandb failed: " in told
    assert "ConnectionError: no route to host" in told
