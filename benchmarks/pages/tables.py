"""What every page is made with: Markdown tables between its prose, and data beside it."""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
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


def put(page: str, name: str, text: str) -> str:
    """The page with the part between `<!-- made: NAME -->` and `<!-- end -->` made again."""
    part = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
    page, count = re.subn(part, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.S)
    if count != 1:
        raise ValueError(f"the page has {count} places for {name}")
    return page


def made(path: Path, parts: Mapping[str, str]) -> str:
    """A page, whose prose is its own, with its made parts made again."""
    page = path.read_text(encoding="utf-8")
    for name, text in parts.items():
        page = put(page, name, text)
    return page


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def versions(*packages: str) -> str:
    found = {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
    return ", ".join(f"{name} {version}" for name, version in found.items())
