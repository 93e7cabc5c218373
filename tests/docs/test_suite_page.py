"""docs/suite.md tells what the committed record of the two commands says."""

from __future__ import annotations

import json

from benchmarks.costs.fresh_clone import OUT, PAGE, render


def test_the_record_is_made_from_the_data() -> None:
    page = PAGE.read_text(encoding="utf-8")
    facts = json.loads(OUT.read_text(encoding="utf-8"))
    assert render(page, facts) == page, "run python benchmarks/costs/fresh_clone.py"
    assert [row["command"] for row in facts["rows"]][:2] == ["make run", "make test"]


def test_another_figure_shows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    facts = json.loads(OUT.read_text(encoding="utf-8"))
    facts["rows"][1]["wall_s"] += 60
    assert render(page, facts) != page
