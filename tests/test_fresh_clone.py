"""A new user's first command: a fresh clone, an empty home, `make run`. CI itself is the second one, `make test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs, needs_checkout

ROOT = Path(__file__).parents[1]

INSTALLED = ("--old-file=install",)
"""For make: what the tests run in, as `.venv`, is as good as what `make install` makes, which waits for the network."""


@needs("make")
@needs_checkout()
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words", [pytest.param(INSTALLED, id="installed"), pytest.param((), id="bare", marks=pytest.mark.full)]
)
def test_make_run_on_a_fresh_clone_ends_in_a_verdict(words: tuple[str, ...], tmp_path: Path) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    if words == INSTALLED:
        (clone / ".venv").symlink_to(sys.prefix)
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PATH", "PIP_", "LANG", "TMP", "SSL"))}
    done = subprocess.run(
        ["make", "run", *words], cwd=clone, env=kept | {"HOME": str(home)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "EQUIVALENT" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == "", "a run leaves nothing behind that git would see"
    assert len(list((clone / "runs").glob("parity_pair/*/metrics.jsonl"))) == 2
