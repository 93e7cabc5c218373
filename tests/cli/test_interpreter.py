"""An interpreter that is too old has no environment made of it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.catalog import ROOT
from tests.support.mutants import kills
from tests.support.needs import needs


def made_of_an_old_one(folder: Path, makefile: str) -> str:
    """The refusal of `make install`, without which pip would say that there is no such torch."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "Makefile").write_text(makefile)
    old = folder / "python3"
    code = "import sys; sys.version_info = (3, 9); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    old.chmod(0o755)
    make = ["make", f"PYTHON={old}", "install"]
    done = subprocess.run(make, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert not (folder / ".venv").exists()
    return done.stderr


MAKEFILE = (ROOT / "Makefile").read_text()
TOLD = "Python 3.9, and 3.11 is the oldest that can be used; type: make PYTHON="


@needs("make")
def test_no_environment_is_made_of_one_that_is_too_old(tmp_path: Path) -> None:
    assert TOLD in made_of_an_old_one(tmp_path, MAKEFILE)


@needs("make")
@kills("The terminal", "old, and installed", "make installs into an interpreter that is too old")
def test_an_install_into_an_old_interpreter_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert TOLD in made_of_an_old_one(tmp_path, MAKEFILE.replace("sys.version_info >= (3, 11)", "True"))
