"""docs/gate.md: its program and the shell steps of its workflow run as printed, and a wrong change is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(WORKFLOW,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
STEPS = {step["name"]: step for step in yaml.safe_load(WORKFLOW)["jobs"]["gate"]["steps"] if "run" in step}
BEFORE = re.findall(r"`(python (?:train|-m harness baseline runs/ci)[^`]*)`", PAGE)


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A step as a runner does it: bash that ends at the first error, in the checkout."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own["GITHUB_STEP_SUMMARY"] = str(folder / "summary.md")
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize(("change", "code", "word"), [("", 0, "EQUAL"), ("1.05 * ", 1, "DIFFERENT")])
def test_the_workflow_runs_as_printed(change: str, code: int, word: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert len(BEFORE) == 2
    for command in BEFORE:
        done = shell(tmp_path, command)
        assert done.returncode == 0, done.stderr
    (tmp_path / "train.py").write_text(PROGRAM.replace("loss.backward()", f"({change}loss).backward()"))
    assert list(STEPS) == ["Install", "Train", "Judge", "Tell"]
    assert shell(tmp_path, STEPS["Train"]["run"]).returncode == 0
    judged = shell(tmp_path, STEPS["Judge"]["run"])
    assert judged.returncode == code, judged.stdout + judged.stderr
    assert word in judged.stdout
    assert STEPS["Tell"]["if"] == "always()"
    assert shell(tmp_path, STEPS["Tell"]["run"]).returncode == 0
    assert word in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "gate.xml").exists()


def test_curves_are_imported_and_judged_as_printed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for number, name in enumerate([*(f"old-{n}" for n in range(5)), "new"]):
        rows = [f"{step},{3 + (number % 3 - 1) * 1e-3 + 1 / step}" for step in range(1, 21)]
        (tmp_path / "logs" / f"{name}.csv").write_text("\n".join(["iteration,train/loss", *rows]))
    (block,) = re.findall(r"```\n(python -m harness import-series.*?)```", PAGE, re.DOTALL)
    done = shell(tmp_path, block)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUIVALENT" in done.stdout
