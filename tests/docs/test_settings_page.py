"""The guide to settings is made from the source."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages.settings_page import guide

DOCS = Path(__file__).parents[2] / "docs"


def test_the_guide_to_settings_is_not_out_of_date() -> None:
    assert (DOCS / "configuration.md").read_text() == guide(), "run: python benchmarks/pages/settings_page.py"
