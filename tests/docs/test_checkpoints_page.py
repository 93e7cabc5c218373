"""docs/checkpoints.md has the figures of its data."""

from __future__ import annotations

from benchmarks.pages import checkpoints, tables


def test_the_page_is_made_from_its_data() -> None:
    page = checkpoints.page(tables.read(checkpoints.DATA))
    assert page == checkpoints.PAGE.read_text(), "run: python benchmarks/pages/checkpoints.py"
