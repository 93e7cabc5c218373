"""The notebook, as a program and as a notebook, on runs that this test makes with the real command line."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from tests.parity.corpus import FP32, OURS
from tests.parity.lab import as_study, write
from tests.support.programs import run_program

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "analysis" / "notebooks" / "loss_parity.py"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parity pair, six steps: one process, and ZeRO-3 on two ranks."""
    root = tmp_path_factory.mktemp("store")
    words = ["-m", "study=parity_pair", "train.steps=6", f"launch.root={root}"]
    done = run_program(["run.py", *words], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def environment(store: Path) -> dict[str, str]:
    return {**os.environ, "STORE": str(store), "STUDY": "parity_pair", "MPLBACKEND": "Agg"}


def test_the_notebook_tells_the_pair_is_equivalent(store: Path) -> None:
    """As a program, in the folder above the store, with the store named as printed in the notebook: `STORE=runs`."""
    done = subprocess.run(
        [sys.executable, str(NOTEBOOK)],
        cwd=store.parent,
        env=environment(Path(store.name)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "EQUIVALENT: study parity_pair, 1 comparisons" in done.stdout
    assert "distance" in done.stdout


@pytest.mark.parametrize(
    ("left", "told"),
    [("nothing", "no study of this name was run"), ("frozen", "1 of 2 cells were never started"), ("torn", "NOT_COMP")],
)
def test_an_unfinished_study_is_told(
    left: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if left != "nothing":
        control, arm = (write(tmp_path, each) for each in (FP32, OURS))
        as_study(tmp_path, {control: None, arm: control}, "Is it the same?")
        (arm / ("config.yaml" if left == "frozen" else "summary.json")).unlink()
    for name, value in (environment(tmp_path) | {"STUDY": "lab", "ARCHIVED": "1"}).items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(NOTEBOOK))
    plt.close("all")
    out = capsys.readouterr().out
    assert told in out
    assert "no run was judged" in out


def test_it_runs_as_a_notebook(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    for name, value in environment(store).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND")  # the kernel draws into the notebook
    notebook = jupytext.read(NOTEBOOK)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", [])}
    assert "display_data" in kinds
    assert "error" not in kinds


def test_the_verdict_command_agrees(store: Path) -> None:
    command = [sys.executable, "-m", "harness", "verdict", "parity_pair", "--root", str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("EQUIVALENT: study parity_pair")
