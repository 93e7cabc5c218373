"""Which branches of the product the tests take, by package.

    python benchmarks/checks/branches.py                     every test that CI runs, on one worker a core
    python benchmarks/checks/branches.py tests/launch -n 2   these tests, with these arguments of pytest; writes nothing
    python benchmarks/checks/branches.py --page              write the page again from the data

Processes that tests start are measured too: forks, whole programs, and ranks that leave by `os._exit`; one that is
killed takes what it saw along. Tracing makes Python two to three times slower, so a test that looks at its time may
fail; the record says how many did. The whole takes about three times as long as CI's tests. Settings are
`tool.coverage` of pyproject.toml. Writes benchmarks/data/branches.json and docs/records/branches.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checks.structure import folder_of
from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT

DATA = "branches.json"
PAGE = tables.DOCS / "records" / "branches.md"
TIMEOUT_S = 1200
"""Of one test, traced."""
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Run tests, traced; counts by package, and what pytest said last."""
    with tempfile.TemporaryDirectory() as folder:
        report, coverage = Path(folder, "report.json"), [sys.executable, "-m", "coverage"]
        pytest = ["-m", "pytest", "-o", f"timeout={TIMEOUT_S}", *arguments]
        run = partial(subprocess.run, cwd=ROOT, text=True, env=os.environ | {"COVERAGE_FILE": f"{folder}/data"})
        told = run([*coverage, "run", *pytest], stdout=subprocess.PIPE, check=False)
        print(told.stdout[-4000:], file=sys.stderr)
        run([*coverage, "combine", "--quiet"], check=True)
        run([*coverage, "json", "--quiet", "-o", str(report)], check=True)
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    found: dict[str, dict[str, int]] = {}
    for path, each in files.items():
        row = found.setdefault(folder_of(Path(path)), dict.fromkeys(COUNTS, 0))
        for count in COUNTS:
            row[count] += each["summary"][count]
    lines = [line for line in told.stdout.splitlines() if " passed" in line or " failed" in line]
    return {"tests": lines[-1].strip("= ") if lines else "no test ended", "packages": dict(sorted(found.items()))}


def render(found: dict[str, Any]) -> str:
    rows = {**found["packages"], "all": {each: sum(row[each] for row in found["packages"].values()) for each in COUNTS}}
    cells = [
        (f"`{package}`", f"{lines:,}", _share(run, lines), f"{branches:,}", _share(taken, branches))
        for package, row in rows.items()
        for lines, run, branches, taken in [[row[count] for count in COUNTS]]
    ]
    table = tables.markdown_table(["package", "statements", "run", "branches", "taken"], cells)
    return tables.made(PAGE, {"branches": f"pytest said: {found['tests']}.\n\n{table}"})


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
