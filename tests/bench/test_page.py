"""The page of the shipped study, from made-up runs of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.pages import engine_step_time
from tests.bench import lab
from tests.docs.test_heads import head_of


def test_page_and_data_hold_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.record(tmp_path, lab.study(tmp_path))
    monkeypatch.setattr(engine_step_time, "STUDY", "lab")
    monkeypatch.setattr(engine_step_time, "ROOT", tmp_path)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/lab.yaml").write_text("question: What does a step cost?\n")
    assert engine_step_time.main(["--root", str(tmp_path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "docs/records/lab.md").read_text()
    data = json.loads((tmp_path / "benchmarks/data/lab.json").read_text())
    assert sum(line.startswith(("ddp", "native", "fsdp")) for line in page.splitlines()) == len(lab.ENGINES)
    assert "`python run.py -m study=lab" in page
    assert head_of(page)[0] == "Record"
    assert data["study_file"].startswith("question:")
    assert len(data["processes"]) == 30
    for path in (tmp_path / "lab").glob("*-r1-*"):
        (path / "provenance.json").write_text(json.dumps({"cpu_model": "another"}))
    shutil.rmtree(tmp_path / "docs")
    assert engine_step_time.main(["--root", str(tmp_path), "--out", str(tmp_path)]) in (3, 4)
