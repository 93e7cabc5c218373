"""Write docs/records/mutants.md: every mutant of this repository, the test that kills it, and the seconds that takes.

    python benchmarks/pages/mutants.py                              run all tests that kill mutants, write data and page
    python benchmarks/pages/mutants.py tests/fsdp/test_mutants.py   run these files alone, keep the others' rows
    python benchmarks/pages/mutants.py --page                       write the page again from the data

What a mutant is and how a test declares one: tests/support/mutants.py. Seconds are wall time on the machine that ran
it; of mutants that ranks visit one after the other, they are those of its own turn. Exits 1 where a mutant survives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.pages import tables
from benchmarks.pages.tables import markdown_table

PAGE = tables.DOCS / "records" / "mutants.md"
DATA, GONE = "mutants.json", "mutants_gone.json"
Rows = list[dict[str, Any]]


def main(argv: Sequence[str]) -> int:
    """Run, write; returns pytest's exit code."""
    parser = tables.parser(__doc__)
    parser.add_argument("files", nargs="*", default=[], help="files or folders of tests (default: all)")
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    code, rows = 0, read()
    if not arguments.page:
        code, found = run(arguments.files)
        rows = merged(rows, found, arguments.files)
        tables.write(DATA, rows)
    PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{PAGE}: {len(rows)} mutants")
    return code


def read() -> Rows:
    rows: Rows = tables.read(DATA, [])
    return rows


def run(files: Sequence[str]) -> tuple[int, Rows]:
    """pytest's exit code, and the mutants that were killed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "pytest", *files, "-m", "kills", "--mutants", str(found)]
        code = subprocess.run(command, cwd=tables.ROOT, check=False).returncode
        return code, json.loads(found.read_text(encoding="utf-8"))


def merged(rows: Rows, found: Rows, files: Sequence[str]) -> Rows:
    kept = [row for row in rows if files and not any(row["test"].startswith(name) for name in files)]
    return sorted([*kept, *found], key=lambda row: (row["area"], row["test"]))


def page(rows: Rows) -> str:
    """The page; rows of a area lie side by side."""
    areas = {str(area): list(of_area) for area, of_area in groupby(rows, key=lambda row: row["area"])}
    counts = [
        (area, len(each), _seconds(sum(float(row["seconds"]) for row in each), 1))
        for area, each in [*areas.items(), ("together", rows)]
    ]
    parts = [markdown_table(["", "mutants", "seconds"], counts)]
    parts += [part for area, each in areas.items() for part in _room(area, each)]
    gone = [[each[key] for key in ("name", "area", "breaks", "gone")] for each in tables.read(GONE)]
    table = markdown_table(["mutant", "of", "what it broke", "gone with, or found as"], gone)
    return tables.made(PAGE, {"mutants": "\n".join(parts), "gone": table})


def _room(area: str, rows: Rows) -> Iterator[str]:
    tests = {str(row["test"]).partition("[")[0] for row in rows}
    one = tests.pop() if len(tests) == 1 else ""
    yield f"\n## {area}\n"
    if one:
        yield f"Killed by `{one}`.\n"
    yield markdown_table(
        ["mutant", "what it breaks", "test", "seconds"],
        [(r["name"], r["breaks"], f"`{r['test'].removeprefix(one)}`", _seconds(r["seconds"])) for r in rows],
    )


def _seconds(seconds: float, digits: int = 2) -> str:
    """Rounded, and never to nothing."""
    least = 10.0**-digits
    return f"{seconds:.{digits}f}" if seconds >= least else f"< {least:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
