"""The package has no circles and no constructor that needs a paragraph."""

from __future__ import annotations

import pytest

from benchmarks.checks.structure import DATA, PACKAGES, ROOT, lines_of_init, look, structure
from benchmarks.pages import tables

MOST_LINES = 39
"""Of the constructor of a sharded model, signature included."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_rooms_import_each_other(package: str) -> None:
    found = structure(ROOT, package)
    assert found["arrows"] > found["packages"], "arrows are counted"
    assert not found["circles"]


def test_a_sharded_model_is_constructed_in_few_lines() -> None:
    assert 17 < lines_of_init(ROOT) <= MOST_LINES


def test_the_record_has_what_is_counted() -> None:
    found = tables.read(DATA)
    assert found["now"].keys() == look(ROOT).keys()
