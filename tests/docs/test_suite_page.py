"""docs/suite.md tells what the committed record of the two commands says."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.costs.fresh_clone import DATA, PAGE, render
from benchmarks.pages import tables

TESTS = Path(__file__).parents[1]


def test_the_record_is_made_from_the_data() -> None:
    page = PAGE.read_text(encoding="utf-8")
    facts = tables.read(DATA)
    assert render(page, facts) == page, "run python benchmarks/costs/fresh_clone.py"
    assert [row["command"] for row in facts["rows"]][:2] == ["make run", "make test"]
    facts["rows"][1]["wall_s"] += 60
    assert render(page, facts) != page


def test_every_file_that_leaves_something_to_test_all_is_named() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## What only `make test-all` runs")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:\w+/)*test_\w+\.py)`", section))
    marked = re.compile(r"mark\.full\b|[= (]Cover\(")
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if path.name != Path(__file__).name and marked.search(path.read_text(encoding="utf-8"))
    }
    assert named == found - {"support/test_covering.py"}
