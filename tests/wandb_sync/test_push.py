"""`harness wandb push STUDY`: verdicts, report and the dashboard, read back as they were written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.parity import StudyVerdict, verdict
from harness.store import provenance
from harness.store.fields import metric_of
from harness.store.rundir import RunDir
from harness.store.wandb_run import outcome
from harness.wandb_sync.push import BAND, VERDICTS, as_json, dashboard, summary_id
from harness.wandb_sync.sync import distance
from tests.parity.corpus import DOUBLED, FP32, OURS
from tests.parity.edits import edit_json
from tests.parity.lab import as_study, write
from tests.support import wandb_file

KEY = "fedcba9876543210" * 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control, an arm that is the same, and one whose gradients are doubled."""
    store = tmp_path_factory.mktemp("store")
    control, clean, doubled = (write(store, each) for each in (FP32, OURS, DOUBLED))
    as_study(store, {control: None, clean: control, doubled: control}, "Is it the same?")
    for run in (control, clean, doubled):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
        edit_json(run / "summary.json", status="done", step=FP32.steps)
    return store


@pytest.fixture(scope="module")
def found(root: Path) -> StudyVerdict:
    return verdict(root, "lab")


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    """A logged table, from the file that `wandb sync` sends."""
    (path,) = folder.glob(f"offline-run-*/files/media/table/{name}_*.table.json")
    held = json.loads(path.read_text())
    return [dict(zip(held["columns"], row, strict=True)) for row in held["data"]]


def test_a_study_is_one_run_however_often_it_is_pushed(
    root: Path, found: StudyVerdict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    for _ in range(2):
        assert main(["wandb", "push", "lab", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "DIFFERENT: verdicts, report and the dashboard" in out
    assert "sync lab --offline" in out.splitlines()[-1], "what needs no key, as this needed none"
    folder = root / "lab" / "wandb"
    records = wandb_file.records(wandb_file.only_file(root / "lab"))
    opened, summary = wandb_file.run_of(records), wandb_file.summary(records)
    assert (opened.run_id, opened.run_group) == (summary_id("lab"), "lab")
    assert (summary["study/verdict"], summary["study/arms"], summary["study/DIFFERENT"]) == ("DIFFERENT", 2, 1)
    assert [(row["verdict"], row["tier"], row["sentence"]) for row in table(folder, "verdicts")] == [
        (arm.outcome.value, arm.tier, arm.sentence) for arm in found.arms
    ]
    (artifact,) = (each.artifact for each in records if each.artifact.type == "verdict")
    contents = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(contents) == {"verdict.json", "dashboard.json", "report.html"}
    assert not [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def metrics(value: Any) -> Iterator[str]:
    """Every metric that a serialised dashboard draws or lists."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from each if key == "metrics" else metrics(each)
    elif isinstance(value, list):
        for each in value:
            yield from metrics(each)


def test_the_dashboard_draws_what_the_copy_sends(root: Path, found: StudyVerdict) -> None:
    """Serialised and read back by the library; a chart of a metric that no run has would stay empty."""
    from wandb_workspaces.workspaces import Workspace
    from wandb_workspaces.workspaces.internal import View

    text = as_json(dashboard("team", "project", "lab", {"lab-a": None, "lab-b": "lab-a", "lab-c": "lab-a"}))
    board = Workspace._from_model(View.model_validate_json(text))
    drawn = {each.removeprefix("summary:") for each in metrics(json.loads(text))}
    distances = distance(found.arms[0])
    parity = {name for point in distances.series.values() for name in point} | set(distances.summary)
    known = parity | set(outcome(RunDir(Path(found.arms[0].arm))))
    known |= {"result/step_time_s", "result/sent_bytes", "result/peak_bytes"}  # what the simulated runs do not record
    for name in drawn:
        declared = metric_of(name.removeprefix("train/")) if name.startswith("train/") else None
        assert name in known or (declared is not None and declared.synced), name
    assert {"train/loss", "parity/loss_difference", "parity/grad_norm_ratio", "train/step_time_s", *BAND} <= drawn
    assert {"train/memory/allocated", "train/time/exposed_comm_s"} <= drawn
    assert [section.name for section in board.sections] == ["Is it still the same run?", "What did it cost?"]
    assert board.runset_settings.filters == "Metric(\"Group\") == 'lab'"
    assert board.runset_settings.baseline_run == "lab-a"
    assert f'"{VERDICTS}"' in text
    band = board.sections[0].panels[1]
    assert band.line_marks == {f"{arm}:{name}": "dashed" for arm in ("lab-b", "lab-c") for name in BAND}
