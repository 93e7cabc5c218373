"""docs/records/mutants.md has every mutant that a test declares, and none that no test declares any more."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

from benchmarks.pages import tables
from benchmarks.pages.mutants import GONE, merged, read
from tests.support.mutants import DECLARED, PROPERTY, Mutant, Recorder

TESTS = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts))
    for path in TESTS.rglob("*.py")
    if path.parent.name != "support"
    and re.search(r"from tests\.support\.mutants import|\b(areas_of|each_is_found)\b", path.read_text(encoding="utf-8"))
)
"""Modules that declare mutants."""


def test_the_page_names_every_mutant() -> None:
    for module in MODULES:
        import_module(module)
    recorded = {Mutant(row["area"], row["name"], row["breaks"]) for row in read()}
    assert recorded == set(DECLARED), "run python benchmarks/pages/mutants.py"


def test_what_is_gone_is_declared_no_more() -> None:
    for module in MODULES:
        import_module(module)
    gone = {(row["area"], row["name"]) for row in tables.read(GONE) if row["gone"]}
    assert len(gone) > 60
    assert not gone & {(mutant.area, mutant.name) for mutant in DECLARED}


def test_rows_of_files_that_were_not_run_are_kept() -> None:
    rows = [{"area": "r", "test": f"tests/{name}::test", "seconds": 1.0} for name in ("a/test_x.py", "a/y.py", "b.py")]
    again = [rows[0] | {"seconds": 2.0}]
    assert merged(rows, again, ["tests/a"]) == [again[0], rows[2]]
    assert merged(rows, again, []) == again


class Report:
    """Of a test that says it has killed something."""

    when, nodeid, duration = "call", "tests/test_x.py::test_y[z]", 7.0

    def __init__(self, passed: bool, *properties: tuple[str, object]) -> None:
        self.passed, self.user_properties = passed, list(properties)


def test_only_what_was_killed_is_recorded_with_its_own_seconds(tmp_path) -> None:
    told = (PROPERTY, ["area", "name", "breaks"])
    recorder = Recorder(tmp_path / "found.json")
    for report in (Report(True, told), Report(True, told, ("seconds", 0.5)), Report(False, told), Report(True)):
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    assert [row["seconds"] for row in json.loads((tmp_path / "found.json").read_text())] == [7.0, 0.5]
