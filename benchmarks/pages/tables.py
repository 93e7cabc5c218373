"""What every generated page is made with: Markdown tables, and data beside the page."""

from __future__ import annotations

import argparse
import io
import json
import platform
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


@contextmanager
def exported(revision: str, *paths: str) -> Iterator[Path]:
    """A temporary folder with the files of a revision, or with these of them."""
    command = ["git", "archive", revision, *paths]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def versions(*packages: str) -> str:
    found = {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
    return ", ".join(f"{name} {version}" for name, version in found.items())
