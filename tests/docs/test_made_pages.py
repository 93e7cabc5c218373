"""Pages that programs make have the figures and names of their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checks import step_trace, structure
from benchmarks.fsdp import dtype_table
from benchmarks.pages import checkpoints, compatibility, metrics_page, mutants, settings_page, tables

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "checkpoints.md": lambda: checkpoints.page(tables.read(checkpoints.DATA)),
    "compatibility.md": lambda: compatibility.page(tables.read(compatibility.DATA)),
    "configuration.md": settings_page.guide,
    "dtypes.md": dtype_table.main,
    "metrics.md": metrics_page.guide,
    "records/mutants.md": lambda: mutants.page(mutants.read()),
    "records/step_trace.md": lambda: step_trace.render(tables.read(step_trace.DATA)),
    "records/structure.md": lambda: structure.render(tables.read(structure.DATA)),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_from_its_data(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), f"run the command that the head of docs/{name} names"
