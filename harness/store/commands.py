"""The commands that we print, as one types them: `python run.py ...` in a checkout, `harness run ...` where installed.

Whoever prints `next:` or a fix asks here, so that it can be typed where it was printed: under the console script if it
was typed, with the path of `run.py` from the current folder, and with the interpreter's path where `python` is another.
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
"""The console script."""

DISTRIBUTION = "sharding-harness"
"""The package's name for pip, as in pyproject.toml."""

TYPED = "HARNESS_TYPED"
"""The variable by which a process, and those it starts, know the console script they were started as, ready to type."""


def started_as_script(argv0: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Remember that the console script was typed.

    Args:
        argv0: the script, as this process was given it.
        environment: where it is remembered.
    """
    found = shutil.which(SCRIPT)
    on_path = found is not None and os.path.abspath(found) == os.path.abspath(argv0)
    environment[TYPED] = SCRIPT if on_path else shown(argv0)


def request(words: str = "") -> str:
    """What asks for runs, before `words` that are ready for a shell."""
    if typed := os.environ.get(TYPED):
        return f"{typed} run {words}".rstrip()
    installed = ROOT.name == SHIPPED
    return f"{verb('run') if installed else script(ROOT / 'run.py')} {words}".rstrip()


def verb(words: str = "") -> str:
    """What asks for a verb, before `words` that are ready for a shell."""
    return f"{os.environ.get(TYPED) or f'{python()} -m harness'} {words}".rstrip()


def install(extra: str) -> str:
    """What installs an optional part: from the checkout, or, of a wheel that is installed, by the package's name."""
    package = DISTRIBUTION if ROOT.name == SHIPPED else _nearest(ROOT)
    return f"{python()} -m pip install {shlex.quote(f'{package}[{extra}]')}"


def script(path: Path | str) -> str:
    """What runs a Python file."""
    return f"{python()} {shown(path)}"


def python() -> str:
    """What starts this interpreter."""
    found = shutil.which("python")
    here = os.path.dirname(os.path.abspath(sys.executable))
    return "python" if found and os.path.dirname(os.path.abspath(found)) == here else shown(sys.executable)


def shown(path: Path | str) -> str:
    """A path as one would type it here."""
    return shlex.quote(_nearest(path))


def _nearest(path: Path | str) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
