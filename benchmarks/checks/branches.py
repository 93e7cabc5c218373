"""Which branches of the product the tests take, by package.

    python benchmarks/checks/branches.py                     every test that CI runs, on one worker a core
    python benchmarks/checks/branches.py tests/launch -n 2   these tests, with these arguments of pytest; writes nothing
    python benchmarks/checks/branches.py --page              write the page again from the data

Processes that tests start are measured too: forks, whole programs, and ranks that leave by `os._exit`; one that is
killed takes what it saw along. Tracing makes Python two to three times slower, so a test that looks at its time may
fail; the record says how many did. The whole takes about three times as long as CI's tests. Writes
benchmarks/data/branches.json and docs/records/branches.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT

DATA = "branches.json"
PAGE = tables.DOCS / "records" / "branches.md"
TIMEOUT_S = 1200
"""Of one test, traced."""
SETTINGS = """\
[run]
branch = true
parallel = true
sigterm = true
patch = subprocess, fork, _exit
source = {source}
data_file = {data}
disable_warnings = no-data-collected, module-not-imported, module-not-measured, module-not-python

[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    @abstractmethod
"""
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
HEAD = """# Branches that the tests take

*Record. How many statements and branches of each package the tests that CI runs reach. Made by
`python benchmarks/checks/branches.py`; the data are in `benchmarks/data/branches.json`.*

A *branch* is a way out of a line that has several. Forks, programs and ranks that the tests start are measured, but for
processes that are killed. pytest said: {tests}.
"""


def package_of(path: str) -> str:
    """The row of a file: its folder, of the engine's packages the package."""
    parts = path.split("/")
    return "/".join(parts[: min(3 if parts[1] == "fsdp" else 2, len(parts) - 1)])


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Run tests, traced; counts by package, and what pytest said last."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings")
        settings.write_text(SETTINGS.format(source=ROOT / "harness", data=Path(folder, "data")), encoding="utf-8")
        coverage = [sys.executable, "-m", "coverage"]
        told = subprocess.run(
            [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", "-o", f"timeout={TIMEOUT_S}", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        print(told.stdout[-4000:], file=sys.stderr)
        subprocess.run([*coverage, "combine", "--quiet", f"--rcfile={settings}"], cwd=ROOT, check=True)
        report = Path(folder, "report.json")
        subprocess.run([*coverage, "json", "--quiet", f"--rcfile={settings}", "-o", str(report)], cwd=ROOT, check=True)
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    found: dict[str, dict[str, int]] = {}
    for path, each in files.items():
        row = found.setdefault(package_of(path), dict.fromkeys(COUNTS, 0))
        for count in COUNTS:
            row[count] += each["summary"][count]
    lines = [line for line in told.stdout.splitlines() if " passed" in line or " failed" in line]
    return {"tests": lines[-1].strip("= ") if lines else "no test ended", "packages": dict(sorted(found.items()))}


def render(found: dict[str, Any]) -> str:
    rows = {**found["packages"], "all": {each: sum(row[each] for row in found["packages"].values()) for each in COUNTS}}
    cells = [
        (
            f"`{package}`",
            f"{row['num_statements']:,}",
            _share(row["covered_lines"], row["num_statements"]),
            f"{row['num_branches']:,}",
            _share(row["covered_branches"], row["num_branches"]),
        )
        for package, row in rows.items()
    ]
    table = tables.markdown_table(["package", "statements", "run", "branches", "taken"], cells)
    return HEAD.format(tests=found["tests"]) + f"\n{table}\n"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments, asked = parser.parse_known_args()
    if arguments.page:
        PAGE.write_text(render(tables.read(DATA)), encoding="utf-8")
        return
    found = {"command": "python benchmarks/checks/branches.py"} | measure(asked or ["-n", str(os.cpu_count())])
    print(render(found))
    if not asked:
        tables.write(DATA, found)
        PAGE.write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    main()
