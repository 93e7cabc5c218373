"""A wheel in an empty environment trains and judges, from another folder, what is one's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.own.guide import COMMANDS, ROOT, written


def ran(*words: str | Path, cwd: Path) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def installed(wheel: Path) -> set[str]:
    """What a wheel puts at the top of site-packages, beside its metadata."""
    with zipfile.ZipFile(wheel) as held:
        return {name.partition("/")[0] for name in held.namelist() if ".dist-info/" not in name}


def test_pages_that_messages_name_are_shipped() -> None:
    sources = [*(ROOT / "harness").rglob("*.py"), ROOT / "run.py"]
    named = {name for each in sources for name in re.findall(r"\bpage\(['\"]([a-z_]+\.md)", each.read_text())}
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = told["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {f"docs/{name}": f"harness/shipped/docs/{name}" for name in named}.items() <= shipped.items()
    assert len(named) == 5
    assert all((ROOT / "docs" / name).is_file() for name in named)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_wheel_trains_what_is_ones_own(tmp_path: Path) -> None:
    ran(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert installed(wheel) == {"harness", "hydra_plugins"}, "the import names that README promises, and no more"
    ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    home = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # torch and the other dependencies of this environment, but not the checkout that its editable install points to
    there = ran(
        sys.executable, "-c", "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))", cwd=tmp_path
    )
    Path(home, "dependencies.pth").write_text(f"import sys; sys.path.append({there.strip()!r})\n")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    ran(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=tmp_path)
    folder = written(tmp_path / "mine")
    assert ran(python, "-c", "import harness; print(harness.__file__)", cwd=folder).startswith(home)
    command = tmp_path / "venv" / "bin" / "harness"
    small = ("train.steps=2", "train.global_batch_size=4", "train.microbatch_size=2", "train.warmup_steps=0")
    assert "done, 2 steps" in ran(command, "run", "experiment=words", *small, cwd=folder)
    assert "mixer-native" in ran(command, "watch", "adhoc", cwd=folder)
    for words in (shlex.split(each) for each in COMMANDS):
        if words[1] == "run.py" and any(word.startswith("study=") for word in words):
            assert "done, 2 steps" in ran(command, "run", *words[2:], *small, cwd=folder)
        elif words[3:4] in (["verdict"], ["report"]):
            assert re.match("(EQUAL|EQUIVALENT): ", ran(command, *words[3:], cwd=folder)), words
    assert (folder / "runs" / "wires" / "report.html").is_file()
