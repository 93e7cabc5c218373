"""Write docs/records/mutants.md: every mutant of this repository, the test that kills it, and the seconds that takes.

    python benchmarks/pages/mutants.py                              run all tests that kill mutants, write data and page
    python benchmarks/pages/mutants.py tests/fsdp/test_mutants.py   run these files alone, keep the others' rows
    python benchmarks/pages/mutants.py --page                       write the page again from the data

What a mutant is and how a test declares one: tests/support/mutants.py. Seconds are wall time on the machine that ran
it; of mutants that ranks visit one after the other, they are those of its own turn. Exits 1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data" / "mutants.json"
PAGE = ROOT / "docs" / "records" / "mutants.md"
Rows = list[dict[str, Any]]
GONE = ROOT / "benchmarks" / "data" / "mutants_gone.json"
GONE_HEAD = """Mutants of mechanisms that were deleted when parameters between passes became DTensors; written by hand.
"""
HEAD = """\
# Mutants

*Record. Every mutant of this repository, the test that kills it, and the seconds that takes. Made by
`python benchmarks/pages/mutants.py`; the data are in `benchmarks/data/mutants.json`.*

A mutant is a piece of this repository with one mistake: our engine, an engine under the conformance suite, or the
comparator. A test that no mutant can fail checks nothing; each mutant here is killed by a test that `make test` runs.
Seconds are wall time; of mutants that the same ranks visit one after the other, they are those of its own turn,
without the start of the ranks, and the first turn of a process pays for what it imports. Files are run apart: a row
holds what the last recorded run of its file took, on a machine of two cores that was not idle, at the commit before
the one that last changed the row (`git blame benchmarks/data/mutants.json`; the data name neither). Seconds show
which mutants are dear, and are no measurement. The fault corpus that verdicts are scored on is another list:
[power.md](power.md).

"""


def main(argv: Sequence[str]) -> int:
    """Run, write; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[], help="files or folders of tests (default: all)")
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    code, rows = 0, read()
    if not arguments.page:
        code, found = run(arguments.files)
        rows = merged(rows, found, arguments.files)
        DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{PAGE}: {len(rows)} mutants")
    return code


def read() -> Rows:
    """What is recorded."""
    rows: Rows = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    return rows


def run(files: Sequence[str]) -> tuple[int, Rows]:
    """pytest's exit code, and the mutants that were killed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "pytest", *files, "-m", "kills", "--mutants", str(found)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return code, json.loads(found.read_text(encoding="utf-8"))


def merged(rows: Rows, found: Rows, files: Sequence[str]) -> Rows:
    """`found`, with the rows of what was not run."""
    kept = [row for row in rows if files and not any(row["test"].startswith(name) for name in files)]
    return sorted([*kept, *found], key=lambda row: (row["area"], row["test"]))


def page(rows: Rows) -> str:
    """The page; rows of a area lie side by side."""
    areas = [(area, list(of_area)) for area, of_area in groupby(rows, key=lambda row: str(row["area"]))]
    parts = [HEAD + "| | mutants | seconds |", "|---|---|---|"]
    parts += [f"| {area} | {len(each)} | {_seconds(_sum(each), 1)} |" for area, each in areas]
    parts.append(f"| together | {len(rows)} | {_seconds(_sum(rows), 1)} |")
    for area, each in areas:
        parts += (
            ["", f"## {area}", "", f"Killed by `{_test(each[0])}`.", ""] if _is_one(each) else ["", f"## {area}", ""]
        )
        parts += ["| mutant | what it breaks | test | seconds |", "|---|---|---|---|"]
        parts += [_line(row, _is_one(each)) for row in each]
    parts += [
        "",
        "## Gone",
        "",
        GONE_HEAD,
        "| mutant | of | what it broke | gone with, or found as |",
        "|---|---|---|---|",
    ]
    gone = json.loads(GONE.read_text(encoding="utf-8"))
    parts += [f"| {' | '.join(_plain(each[key]) for key in ('name', 'area', 'breaks', 'gone'))} |" for each in gone]
    return "\n".join(parts) + "\n"


def _line(row: dict[str, Any], is_one: bool) -> str:
    test = row["test"].removeprefix(_test(row)) if is_one else row["test"]
    return f"| {_plain(row['name'])} | {_plain(row['breaks'])} | `{_plain(test)}` | {_seconds(row['seconds'])} |"


def _seconds(seconds: float, digits: int = 2) -> str:
    """Rounded, and never to nothing."""
    least = 10.0**-digits
    return f"{seconds:.{digits}f}" if seconds >= least else f"< {least:g}"


def _test(row: dict[str, Any]) -> str:
    return str(row["test"]).partition("[")[0]


def _is_one(rows: Rows) -> bool:
    """Whether one parametrised test kills all of them."""
    return len({_test(row) for row in rows}) == 1


def _sum(rows: Rows) -> float:
    return sum(float(row["seconds"]) for row in rows)


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
