"""Time the README's two commands on a fresh clone with an empty home directory.

    python benchmarks/costs/fresh_clone.py

writes benchmarks/data/fresh_clone.json: wall seconds of `make run` and `make test`, versions, and the machine.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "data" / "fresh_clone.json"


def main() -> int:
    """Clone, run both commands, write the figures; the exit code is the worse of the two commands'."""
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "clone", Path(folder) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PATH", "PIP_", "LANG", "TMP", "SSL"))}
        rows: list[dict[str, object]] = []
        for command in ("make run", "make test"):
            rows.append(time_command(command, clone, kept | {"HOME": str(home)}))
            write(rows, clone)  # after each: the second command takes a quarter of an hour
    for row in rows:
        print(f"{row['command']:10} {row['wall_s']:8.1f} s  exit {row['exit']}")
    return max(int(row["exit"]) for row in rows)


def write(rows: list[dict[str, object]], clone: Path) -> None:
    """Write the figures there are, with what they were made on."""
    facts = {
        "command": "python benchmarks/costs/fresh_clone.py",
        "commit": output(["git", "rev-parse", "HEAD"], clone),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "packages": output(
            [str(clone / ".venv/bin/python"), "-m", "pip", "freeze", "--exclude-editable"], clone
        ).splitlines(),
        "rows": rows,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(facts, indent=1) + "\n")


def time_command(command: str, folder: Path, env: dict[str, str]) -> dict[str, object]:
    """Wall seconds and exit code of one command; its last lines are kept."""
    start = time.perf_counter()
    done = subprocess.run(command.split(), cwd=folder, env=env, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    return {"command": command, "wall_s": round(wall, 1), "exit": done.returncode, "end": done.stdout.splitlines()[-3:]}


def output(command: list[str], folder: Path) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
