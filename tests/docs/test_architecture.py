"""docs/architecture.svg is what its script draws, and every package it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pages.architecture import COLUMNS, FILES, picture

ROOT = Path(__file__).parents[2]


def test_the_picture_is_what_its_script_draws() -> None:
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == picture() + "\n"


def test_every_room_is_there() -> None:
    packages = [
        package
        for column in COLUMNS
        for text in column.packages
        for package in re.findall(r"\w+\.py|harness/[\w, ]+", text)
    ]
    for package in packages:
        folder, *others = package.removeprefix("harness/").split(", ")
        for name in (folder, *others):
            assert (ROOT / name).exists() or (ROOT / "harness" / name).exists(), name
    page = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
    assert all(part in page for text in FILES for part in text.replace("N/", "").split(", "))
