"""What every generated page is made with: Markdown tables, and data beside the page."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, DOCS = ROOT / "benchmarks" / "data", ROOT / "docs"


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Cells are escaped; a head of one empty cell is `| |`."""
    lines = [f"| {' | '.join(map(_cell, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0].replace("|  |", "| |"), "|" + "---|" * len(head), *lines[1:]])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def read(name: str, default: Any = None) -> Any:
    """Value of `benchmarks/data/NAME`; `default` if it is missing."""
    path = DATA / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def write(name: str, facts: Any) -> None:
    (DATA / name).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def versions(*packages: str) -> str:
    """`python 3.11.7, torch 2.13.0`."""
    found = {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
    return ", ".join(f"{name} {version}" for name, version in found.items())
