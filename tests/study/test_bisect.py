"""Versions of the code compared: requests that none can answer, and a real history, by `git bisect run`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.errors import BadRequest
from harness.revisions import Request
from tests.study.test_code import commit, git

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("word", ["train.steps=2", "numerics=fast"])
def test_bits_are_not_demanded_where_sums_have_no_order(word: str) -> None:
    with pytest.raises(BadRequest, match="numerics=fast promises no order"):
        Request((word,), bitwise=True).check()


SMALL = (
    "train.steps=2",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=2",
    "model.num_layers=1",
    "data=synthetic",
    "data.seq_len=16",
    "ckpt=none",
    "sharding=optim",
)


ALONE = (*SMALL, "mesh=one")
"""A version is a process of its own: one rank in it is the least that trains."""


def harness(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line of the project in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """This project as it is now, as a repository of four commits, one of which divides gradients wrongly."""
    top = tmp_path / "project"
    top.mkdir()
    for name in ("harness", "conf", "sweeps", "hydra_plugins"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.py", ".gitignore"):
        shutil.copy(ROOT / name, top / name)
    git(top, "init", "--quiet", "--initial-branch=main")
    commit(top, "", "Begin")
    engine = top / "harness" / "fsdp" / "build.py"
    right = engine.read_text()
    wrong = right.replace("factor=1.0 / self.divisor", "factor=1.02 / self.divisor")
    assert wrong != right, "the engine divides elsewhere now: this test must follow"
    for subject, text in (("Comment", f"{right}# a\n"), ("Tidy up", f"{wrong}# a\n"), ("Another", f"{wrong}# b\n")):
        engine.write_text(text)
        commit(top, "", subject)
    return top


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wrong_factor_is_found_in_a_real_history(project: Path) -> None:
    """By the lines that docs/bisect.md prints."""
    block = (ROOT / "docs/bisect.md").read_text().partition("## The commit\n")[2].split("```")[1]
    lines = block.replace("HEAD v1.2", "main main~3").replace("--code v1.2", "--code main~3")
    script = lines.replace("train.steps=20", shlex.join(ALONE)).replace("python", sys.executable)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(["bash", "-ec", script], cwd=project, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    culprit = git(project, "rev-parse", "main~1")
    assert f"{culprit} is the first bad commit" in done.stdout
    assert "2 %" in done.stdout
    assert git(project, "status", "--porcelain") == ""
    unknown = harness(project, "-m", "harness", "compare", "--code", "main~1", "main", "train.stepz=2")
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert "train.stepz: train has no such setting" in unknown.stderr
