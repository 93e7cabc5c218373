"""Every package and file that docs/architecture.svg names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_room_is_there() -> None:
    words = re.findall(r">([^<]+)</text>", (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8"))
    packages = [package for text in words for package in re.findall(r"\w+\.py|harness/[\w, ]+", text)]
    assert len(packages) > 12
    for package in packages:
        for name in package.removeprefix("harness/").split(", "):
            assert (ROOT / name).exists() or (ROOT / "harness" / name).exists(), name
    files = words[words.index("config.yaml") : words.index("attempts/N/") + 1]
    page = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
    assert all(part in page for text in files for part in text.replace("N/", "").split(", "))
