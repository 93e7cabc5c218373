"""docs/quickstart.md from its second block on: each command as printed, in order, with the answers the page tells."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """What the page prints at the beginning of a line, without its comments, after the environment is there."""
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    return [line.partition(" # ")[0].strip() for block in blocks[2:] for line in block.splitlines()]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_minutes_as_printed(tmp_path: Path) -> None:
    """`make run`, which a fresh clone is tested with, is not repeated: the study is trained here."""
    said: dict[str, list[tuple[int, str]]] = {}
    first = ""
    for command in commands():
        words = [first if word == "RUN" else word for word in shlex.split(command)]
        words = [sys.executable, *(str(ROOT / word) if word == "run.py" else word for word in words[1:])]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert "Traceback" not in done.stdout + done.stderr
        said.setdefault(command, []).append((done.returncode, done.stdout))
        first = first or done.stdout.rpartition("harness show ")[2][:8]
    (equivalent, different) = said.pop("python -m harness compare @last RUN")
    assert (equivalent[0], equivalent[1].split(":")[0]) == (0, "EQUIVALENT")
    assert (different[0], different[1].split(":")[0]) == (1, "DIFFERENT")
    assert {code for each in said.values() for code, _ in each} == {0}
    assert said["python -m harness verdict parity_pair"][0][1].startswith("EQUIVALENT")
