"""That a test which never ends is told, and the others run all the same; that one which fails does so at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SUITE = """
import ctypes, pytest, signal

@pytest.mark.timeout(1)
def test_waits_in_c():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # which would wake it
    ctypes.PyDLL(None).sleep(600)  # with the lock of the interpreter

def test_comes_after():
    pass
"""


LONG = """
from hypothesis import settings

def test_long_lists_differ():
    assert settings.default.derandomize, "examples are not those of CI"
    assert [(n,) * (n % 13) for n in range(20_000)] == [(n,) * (n % 11) for n in range(20_000)]
"""


def told_by(suite: str, folder: Path, seconds: float, **environment: str) -> str:
    """What a session with our settings and one worker prints of a module of tests."""
    (folder / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import pytest_plugins\n"
        "import tests.conftest\ntests.conftest.GRACE_S = 2.0\n"
    )
    (folder / "test_two.py").write_text(suite)
    where = ["--rootdir", str(folder), "-c", f"{ROOT}/pyproject.toml", "--confcutdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", *where, "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT, env={k: v for k, v in os.environ.items() if k != "TESTS_PROFILE"} | environment,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_test_that_waits_in_c_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    told = told_by(SUITE, tmp_path, 200)
    assert "1 failed, 1 passed" in told, told
    assert "crashed while running" in told, told
    assert "test_two.py" in told, told


def test_long_lists_that_differ_are_told_at_once_under_ci(tmp_path: Path) -> None:
    told = told_by(LONG, tmp_path, 60, CI="true")  # pytest's own comparison of all their lines takes many minutes
    assert "1 failed" in told, told
    assert "At index 11 diff" in told, told
