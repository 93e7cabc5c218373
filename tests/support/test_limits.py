"""That a test which never ends is told, and the others run all the same."""

from __future__ import annotations

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


def test_a_test_that_waits_in_c_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    """In a session with our settings and one worker."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import pytest_plugins\n"
        "import tests.conftest\ntests.conftest.GRACE_S = 2.0\n"
    )
    (tmp_path / "test_two.py").write_text(SUITE)
    where = ["--rootdir", str(tmp_path), "-c", f"{ROOT}/pyproject.toml", "--confcutdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", *where, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert "1 failed, 1 passed" in told, told
    assert "crashed while running" in told, told
    assert "test_two.py" in told, told
