"""The files and commands of docs/own.md, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", TEXT, re.M | re.S))
COMMANDS = [line for block in re.findall(r"^```\n(python .*?)^```$", TEXT, re.M | re.S) for line in block.splitlines()]


def written(folder: Path) -> Path:
    """A user's folder with all of the guide's files, and a text."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of Python's in a folder, with this repository in its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
