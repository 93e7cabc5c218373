"""Programs beyond Python and the base system: without them a test is skipped, and says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def path_of(program: str) -> str | None:
    """Where a program is; daemons lie beyond the PATH of some users."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def needs(*programs: str) -> pytest.MarkDecorator:
    """The mark of a test that is skipped where one of these programs is not installed."""
    why = _missing(programs)
    return pytest.mark.skipif(bool(why), reason=why)


def needs_checkout() -> pytest.MarkDecorator:
    """The mark of a test that asks git about this repository, which git refuses where it is another user's."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--git-dir"]
    works = path_of("git") is not None and subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return pytest.mark.skipif(not works, reason="needs git, and a checkout that git reads")


def skip_without(*programs: str) -> None:
    """Skip the test that asks, or the tests of the fixture that does."""
    if why := _missing(programs):
        pytest.skip(why)


def _missing(programs: Sequence[str]) -> str:
    missing = [each for each in programs if path_of(each) is None]
    return f"needs {', '.join(missing)} (Debian packages: .ci/apt.txt)" if missing else ""
