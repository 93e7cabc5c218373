"""What is skipped where a program is missing, and the files that `.ci/bare` runs where all of them are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.needs import needs, needs_checkout, skip_without

ROOT = Path(__file__).parents[2]
SPOILT = ("launch/test_sbatch.py", "study/test_cells.py", "study/test_code.py", "store/test_provenance.py")
"""Files that once failed on a fresh machine."""
SPOILT_BY_SIGNALS_OR_SPACES = ("worker/test_signals.py", "cli/test_completion.py", "test_fresh_clone.py")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs("here").args == (False,)
    assert needs("here", "not-here").mark.kwargs["reason"] == "needs not-here (Debian packages: .ci/apt.txt)"
    skip_without("here")
    with pytest.raises(pytest.skip.Exception, match="needs not-here, nor-here"):
        skip_without("not-here", "here", "nor-here")
    assert needs_checkout().args == (True,), "git is not here"


@needs_checkout()
def test_what_a_machine_may_spoil_is_tried_on_a_bare_one() -> None:
    found = re.search(r"^said='(.*)'$", (ROOT / ".ci/bare").read_text(encoding="utf-8"), re.M)
    assert found is not None
    listed = subprocess.run(
        ["git", "grep", "-lE", found[1], "--", "tests/**test_*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"tests/{name}" for name in (*SPOILT, *SPOILT_BY_SIGNALS_OR_SPACES)} <= set(listed.stdout.splitlines())
