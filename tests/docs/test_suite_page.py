"""docs/suite.md says what was measured, and its record is made from the data beside it."""

from __future__ import annotations

import json

from benchmarks.costs import fresh_clone


def test_the_record_is_that_of_the_data() -> None:
    page = fresh_clone.PAGE.read_text(encoding="utf-8")
    made = fresh_clone.render(page, json.loads(fresh_clone.OUT.read_text(encoding="utf-8")))
    assert made == page, "run: python benchmarks/costs/fresh_clone.py"
