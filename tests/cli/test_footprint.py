"""What a default run leaves on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MOST_BYTES = 20, 12 * 2**20
"""Of a store with one run of 20 steps on two ranks: 0.87 MiB of weights, whose checkpoint takes 2.5 MiB."""


def test_a_default_run_leaves_few_files(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "run.py"), f"launch.root={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "diff.patch"]
    assert len(files) <= MOST_FILES, sorted(str(path.relative_to(tmp_path)) for path in files)
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
