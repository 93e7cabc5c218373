"""docs/architecture.md: each place of its table of questions and of its picture exists, and the page is short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("|").split("|") for line in PAGE.partition("## Where to look")[2].splitlines() if "`harness/" in line
]


def names_of(path: Path) -> set[str]:
    """Classes, functions and constants of a module, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_question_is_answered_by_what_is_there(row: list[str]) -> None:
    _, files, places = row
    known = {name for file in re.findall("`([^`]+)`", files) for name in names_of(ROOT / file)}
    named = re.findall("`([^`]+)`", places)
    assert named
    assert set(named) <= known


def test_the_page_is_short_and_asks_ten_questions_at_least() -> None:
    assert len(ROWS) >= 10
    assert len(PAGE.splitlines()) <= 120


def test_every_room_of_the_picture_is_there() -> None:
    words = re.findall(r">([^<]+)</text>", (DOCS / "architecture.svg").read_text(encoding="utf-8"))
    packages = [package for text in words for package in re.findall(r"\w+\.py|harness/[\w, ]+", text)]
    assert len(packages) > 12
    for package in packages:
        for name in package.removeprefix("harness/").split(", "):
            assert (ROOT / name).exists() or (ROOT / "harness" / name).exists(), name
    files = words[words.index("config.yaml") : words.index("attempts/N/") + 1]
    page = (DOCS / "run_directory.md").read_text(encoding="utf-8")
    assert all(part in page for text in files for part in text.replace("N/", "").split(", "))
