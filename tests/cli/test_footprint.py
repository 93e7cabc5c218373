"""What a default run leaves on the disk, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MOST_BYTES = 20, 12 * 2**20
"""Of a store with one run of 20 steps on two ranks: 0.87 MiB of weights, whose checkpoint takes 2.5 MiB."""

MOST_PROCESSES = 6
"""run.py, git, two ranks, and two of multiprocessing's, whose start is no audit event: the ranks' server, a tracker."""
COUNTER = """
import sys

def note(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        with open({file!r}, "a") as file:
            file.write(f"{{event}} {{arguments}}\\n")

sys.addaudithook(note)
"""


def test_a_default_run_leaves_few_files_and_starts_few_processes(tmp_path: Path) -> None:
    root, hooks, starts = tmp_path / "runs", tmp_path / "hooks", tmp_path / "starts"
    hooks.mkdir()
    (folder := tmp_path / ("t" * 90)).mkdir()
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/__init__.py").write_text("raise SystemExit('a stray package')")
    (hooks / "sitecustomize.py").write_text(COUNTER.format(file=str(starts)))
    words = [sys.executable, str(ROOT / "run.py"), f"launch.root={root}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["TMPDIR"] = str(folder)  # longer than a socket's path may be
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "diff.patch"]
    assert len(files) <= MOST_FILES, sorted(str(path.relative_to(root)) for path in files)
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    started = [line for line in starts.read_text().splitlines() if "'diff'" not in line]  # of a checkout with changes
    assert 1 + 2 + len(started) <= MOST_PROCESSES, started
