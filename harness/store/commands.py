"""Printed commands in a form to type: `python run.py ...` in a checkout, `harness run ...` where installed.

They use the console script if it was typed, the path of `run.py` from the current folder, and the interpreter's path
where `python` is another.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

from harness.store.provenance import ROOT, SHIPPED

SCRIPT = "harness"
DISTRIBUTION = "sharding-harness"
USUAL = "runs"
TYPED = "HARNESS_TYPED"


def started_as_script(argv0: str, environment: MutableMapping[str, str] = os.environ) -> None:
    script, found = os.path.abspath(argv0), shutil.which(SCRIPT)
    environment[TYPED] = SCRIPT if found and os.path.abspath(found) == script else shlex.quote(script)


def request(words: str = "", folder: str = "") -> str:
    """Command before `words` (shell-quoted) of a request.

    Args: folder: where relative paths, options and the user's classes are found.
    """
    there = folder if folder and os.path.abspath(folder) != os.getcwd() else None
    script = f"{python(there)} {shown(ROOT / 'run.py', there)}"
    begin = f"{_harness(there)} run" if os.environ.get(TYPED) or ROOT.name == SHIPPED else script
    return f"{f'cd {shlex.quote(there)} && ' if there else ''}{begin} {words}".rstrip()


def verb(words: str = "", root: Path | str | None = None) -> str:
    """Command of a verb before `words` (shell-quoted), in the store `root`."""
    where = "" if root is None or is_usual(root) else f" --root {shlex.quote(str(root))}"
    return f"{_harness()} {words}{where}".rstrip()


def is_usual(root: Path | str) -> bool:
    return Path(root).absolute() == Path(USUAL).absolute()


def _harness(start: str | None = None) -> str:
    return os.environ.get(TYPED) or f"{python(start)} -m harness"


def page(name: str) -> str:
    """Path of a page of the documentation: `docs/own.md`, or where a wheel has it."""
    return str(ROOT / "docs" / name) if ROOT.name == SHIPPED else f"docs/{name}"


def install(extra: str) -> str:
    package = DISTRIBUTION if ROOT.name == SHIPPED else os.path.relpath(ROOT)
    return f"{python()} -m pip install {shlex.quote(f'{package}[{extra}]')}"


def script(path: Path | str) -> str:
    return f"{python()} {shown(path)}"


def python(start: str | None = None) -> str:
    found = shutil.which("python")
    here = os.path.dirname(os.path.abspath(sys.executable))
    return "python" if found and os.path.dirname(os.path.abspath(found)) == here else shown(sys.executable, start)


def shown(path: Path | str, start: str | None = None) -> str:
    """Shell word of a path, relative to `start` (the current folder by default) where it lies below."""
    relative = os.path.relpath(path, start)
    return shlex.quote(os.path.abspath(path) if relative.startswith("..") else relative)
