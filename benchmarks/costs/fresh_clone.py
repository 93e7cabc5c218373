"""Time the README's two commands, and `make test-all`, on a fresh clone with an empty home directory.

    python benchmarks/costs/fresh_clone.py [--all]

Writes benchmarks/data/fresh_clone.json (wall seconds, numbers of tests, the ten slowest tests, versions, the machine)
and the record at the end of docs/suite.md. The machine should be idle: `load_before` says whether it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "data" / "fresh_clone.json"
PAGE = ROOT / "docs" / "suite.md"
SLOWEST = 10


def main() -> int:
    """Clone, run the commands, write the figures; the exit code is the worst of the commands'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="make test-all too, which takes up to an hour")
    commands = ["make run", "make test", *(["make test-all"] if parser.parse_args().all else [])]
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "clone", Path(folder) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PATH", "PIP_", "LANG", "TMP", "SSL"))}
        rows: list[dict[str, Any]] = []
        for command in commands:
            rows.append(time_command(command, clone, kept | {"HOME": str(home)}, Path(folder) / "tests.xml"))
            write(rows, clone)  # after each: the later ones take long
    for row in rows:
        print(f"{row['command']:14} {row['wall_s']:8.1f} s  exit {row['exit']}")
    return max(int(row["exit"]) for row in rows)


def write(rows: list[dict[str, Any]], clone: Path) -> None:
    """Write the figures there are, with what they were made on."""
    facts = {
        "command": "python benchmarks/costs/fresh_clone.py",
        "commit": output(["git", "rev-parse", "HEAD"], clone),
        "date": output(["git", "show", "-s", "--format=%cs", "HEAD"], clone),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "packages": output(
            [str(clone / ".venv/bin/python"), "-m", "pip", "freeze", "--exclude-editable"], clone
        ).splitlines(),
        "rows": rows,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(facts, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), facts), encoding="utf-8")


def render(page: str, facts: dict[str, Any]) -> str:
    """The page with its record made from the data."""
    lines = [
        f"Commit {facts['commit'][:7]} of {facts['date']}, {facts['machine']['cpus']} cores; made by"
        f" `{facts['command']}`, data in [fresh_clone.json](../benchmarks/data/fresh_clone.json).",
        "",
        "| command | wall | tests | exit | load before |",
        "|---|---|---|---|---|",
    ]
    for row in facts["rows"]:
        minutes = f"{row['wall_s'] / 60:.1f} min"
        lines.append(
            f"| `{row['command']}` | {minutes} | {row['tests'] or '-'} | {row['exit']} | {row['load_before']:.1f} |"
        )
    for row in facts["rows"]:
        if row["slowest"]:
            lines += [
                "",
                f"The slowest tests of `{row['command']}`, their setup included:",
                "",
                "| test | s |",
                "|---|---|",
            ]
            lines += [f"| `{name}` | {seconds:.0f} |" for name, seconds in row["slowest"]]
    text = "\n".join(lines)
    made, count = re.subn(
        r"(<!-- made: record -->\n).*?(<!-- end -->)", lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.S
    )
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for the record")
    return made


def time_command(command: str, folder: Path, env: dict[str, str], report: Path) -> dict[str, Any]:
    """Wall seconds and exit code of one command, its last lines, and what its tests took."""
    report.unlink(missing_ok=True)
    load = os.getloadavg()[0]
    start = time.perf_counter()
    done = subprocess.run(
        command.split(),
        cwd=folder,
        env=env | {"PYTEST_ADDOPTS": f"--junitxml={report}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.perf_counter() - start
    tests = seconds_of_tests(report)
    return {
        "command": command,
        "wall_s": round(wall, 1),
        "exit": done.returncode,
        "load_before": round(load, 2),
        "tests": len(tests),
        "slowest": sorted(tests, key=lambda test: -test[1])[:SLOWEST],
        "end": done.stdout.replace(f"{folder}/", "").splitlines()[-12:],
    }


def seconds_of_tests(report: Path) -> list[tuple[str, float]]:
    """Every test with its seconds, from pytest's JUnit file; none where there is no such file."""
    if not report.exists():
        return []
    cases = ElementTree.parse(report).iter("testcase")
    return [(f"{each.get('classname')}::{each.get('name')}", float(each.get("time", 0))) for each in cases]


def output(command: list[str], folder: Path) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
