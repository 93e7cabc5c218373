"""Time the README's two commands, or `make test-all`, on a fresh clone with an empty home, as CI does (CI=true).

    python benchmarks/costs/fresh_clone.py [run] [test] [test-all]

Without words: `make run` and `make test`. Writes benchmarks/data/fresh_clone.json (wall seconds, numbers of tests, the
ten slowest tests and those that failed, the machine; of each command its latest run, with its commit) and the
record at the end of docs/suite.md. The machine should be idle: `load_before` says whether it was.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT

DATA = "fresh_clone.json"
PAGE = tables.DOCS / "suite.md"
SLOWEST = 10
TARGETS = ("run", "test", "test-all")


def main() -> int:
    """Clone, run the commands, write the figures; the exit code is the worst of the commands'."""
    parser = tables.parser(__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of the Makefile: {', '.join(TARGETS)}")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - set(TARGETS):
        parser.error(f"{', '.join(sorted(unknown))}: targets are {', '.join(TARGETS)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "clone", Path(folder) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PATH", "PIP_", "LANG", "TMP", "SSL"))}
        for target in asked.targets or TARGETS[:2]:
            rows.append(time_command(f"make {target}", clone, kept | {"HOME": str(home), "CI": "true"}))
            write(rows[-1], clone)  # after each: the later ones take long
    for row in rows:
        print(f"{row['command']:14} {row['wall_s']:8.1f} s  exit {row['exit']}")
    return max(int(row["exit"]) for row in rows)


def write(row: dict[str, Any], clone: Path) -> None:
    command = ["git", "show", "-s", "--format=%H %cs", "HEAD"]
    commit, date = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True).stdout.split()
    rows = {each["command"]: each for each in tables.read(DATA)["rows"]}
    rows[row["command"]] = row | {"commit": commit, "date": date}
    facts = {
        "command": "python benchmarks/costs/fresh_clone.py",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "rows": [rows[f"make {target}"] for target in TARGETS if f"make {target}" in rows],
    }
    tables.write(DATA, facts)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), facts), encoding="utf-8")


def render(page: str, facts: dict[str, Any]) -> str:
    rows = [
        (
            f"`{row['command']}`",
            f"{row['commit'][:7]} of {row['date']}",
            f"{row['wall_s'] / 60:.1f} min",
            row["tests"] or "-",
            len(row["failed"]) or "none",
            f"{row['load_before']:.1f}",
        )
        for row in facts["rows"]
    ]
    made = f"{facts['machine']['cpus']} cores; made by `{facts['command']}`, data in"
    parts = [
        f"{made} [fresh_clone.json](../benchmarks/data/fresh_clone.json).\n",
        tables.markdown_table(["command", "commit", "wall", "tests", "failed", "load before"], rows),
    ]
    for row in facts["rows"]:
        if row["failed"]:
            parts += [f"\nWhat failed in `{row['command']}`:\n", *(f"- `{name}`" for name in row["failed"])]
    for row in facts["rows"]:
        if row["slowest"]:
            slowest = [(f"`{name}`", f"{seconds:.0f}") for name, seconds in row["slowest"]]
            parts += [f"\nThe slowest tests of `{row['command']}`, their setup included:\n"]
            parts += [tables.markdown_table(["test", "s"], slowest)]
    return tables.put(page, "record", "\n".join(parts))


def time_command(command: str, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """Wall seconds and exit code of one command, and what its tests took."""
    report, printed = (folder.parent / f"{command.replace(' ', '-')}.{kind}" for kind in ("xml", "log"))
    load = os.getloadavg()[0]
    start = time.perf_counter()
    with printed.open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command.split(),
            cwd=folder,
            env=env | {"PYTEST_ADDOPTS": f"--junitxml={report}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    wall = time.perf_counter() - start
    tests, failed = seconds_of_tests(report)
    return {
        "command": command,
        "wall_s": round(wall, 1),
        "exit": done.returncode,
        "load_before": round(load, 2),
        "tests": len(tests),
        "failed": failed,
        "slowest": sorted(tests, key=lambda test: -test[1])[:SLOWEST],
    }


def seconds_of_tests(report: Path) -> tuple[list[tuple[str, float]], list[str]]:
    """Every test with its seconds, and those that failed, from pytest's JUnit file; none where there is none."""
    if not report.exists():
        return [], []
    named = {
        f"{each.get('classname')}::{each.get('name')}": each for each in ElementTree.parse(report).iter("testcase")
    }
    failed = [name for name, each in named.items() if {"failure", "error"} & {inner.tag for inner in each}]
    return [(name, float(each.get("time", 0))) for name, each in named.items()], failed


if __name__ == "__main__":
    sys.exit(main())
