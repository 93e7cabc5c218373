"""The notebooks, as programs and as notebooks, on runs that this test makes with the real command line."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest

from harness.store import status
from harness.store.status import State
from harness.store.study import read_study
from tests.parity.edits import edit_json
from tests.parity.lab import pair
from tests.support.programs import run_program

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "analysis" / "notebooks"
NOTEBOOKS = {"loss_parity": 2, "step_time": 1, "memory_and_bytes": 2, "verdict_power": 0}
"""How many pictures each draws of a study that is whole."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parity pair, six steps: one process, and ZeRO-3 on two ranks."""
    root = tmp_path_factory.mktemp("store") / "runs"
    words = ["-m", "study=parity_pair", "train.steps=6", f"launch.root={root}"]
    done = run_program(["run.py", *words], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    plt.close("all")
    yield
    plt.close("all")


def environment(store: Path | str, study: str = "parity_pair") -> dict[str, str]:
    return {"STORE": str(store), "STUDY": study}


def told(name: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Run a notebook as a program; what it prints. A picture that cannot be drawn well warns, and fails here."""
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        for place in plt.get_fignums():
            plt.figure(place).canvas.draw()
    found: str = capsys.readouterr().out
    return found


def test_every_notebook_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_as_a_program(
    name: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(store.parent)
    out = told(name, environment(store.name), monkeypatch, capsys)
    assert "Does ZeRO-3 on two ranks train the same model" in out
    assert "There is no run" not in out
    assert len(plt.get_fignums()) == NOTEBOOKS[name]
    if name == "loss_parity":
        assert "EQUIVALENT: study parity_pair, 1 comparison\n" in out


@pytest.mark.parametrize("left", ["nothing", "frozen", "torn", "failed", "not begun", "not listed", "not text"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_an_unfinished_study_is_told_in_a_sentence(
    name: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if left != "nothing":
        control, arm = pair(tmp_path)
        if left == "failed":
            status.note(arm, state=State.failed, reason="no luck")
        elif left == "not listed":
            edit_json(tmp_path / "lab/study.json", cells=read_study(tmp_path, "lab")["cells"][1:])
        elif left == "not text":
            (arm / "config.yaml").write_bytes(b"notes: caf\xe9\n")
        elif left == "not begun":
            for run in (control, arm):
                for file in ("status.json", "metrics.jsonl", "summary.json", "provenance.json"):
                    (run / file).unlink()
        else:
            (arm / ("config.yaml" if left == "frozen" else "summary.json")).unlink()
    out = told(name, {**environment(tmp_path, "lab"), "ARCHIVED": "1"}, monkeypatch, capsys)
    sentences = {
        "nothing": "No study of this name was run",
        "frozen": "1 of 2 cells was never started, or was removed",
        "torn": "No arm could be held against its control",
        "failed": "Not every run is done: 1 failed",
        "not listed": "which it does not list; remove the file",
        "not text": "config.yaml is not UTF-8 text",
        "not begun": "Not every run is done: 2 not started",
    }
    assert sentences[left] in out
    assert "Traceback" not in out
    if name in ("loss_parity", "verdict_power"):
        assert "No run was judged" in out


@pytest.mark.parametrize("name", [each if each == "loss_parity" else pytest.param(each, marks=pytest.mark.full)
                                  for each in NOTEBOOKS])  # fmt: skip
def test_it_runs_as_a_notebook_by_the_command_printed_in_it(name: str, store: Path, tmp_path: Path) -> None:
    pytest.importorskip("jupytext")
    pytest.importorskip("nbconvert")
    (tmp_path / "runs").symlink_to(store)
    copy = tmp_path / "analysis/notebooks" / f"{name}.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(FOLDER / f"{name}.py", copy)
    (printed,) = re.findall(r"^#     (STORE=.* jupytext .*)$", copy.read_text(), re.M)
    command = printed.replace("STUDY=strategies", "STUDY=parity_pair")
    variables = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}  # it draws into the notebook
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**variables, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(copy.with_suffix(".ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == NOTEBOOKS[name]
    assert not [output for output in outputs if output["output_type"] == "error"]
