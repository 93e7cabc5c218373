"""A run's failure, for which others of its study need not start."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.store import first_failure
from harness.store.rundir import RunDir


def test_a_failure_counts_for_what_was_submitted_before_it(tmp_path: Path) -> None:
    failing, other = (RunDir(tmp_path / "s" / name) for name in "ab")
    attempt = other.new_attempt()
    script = other.attempt_dir(attempt) / "submit.sh"
    script.touch()
    failing.path.mkdir()
    assert first_failure.since(other, attempt) == ""
    first_failure.tell(failing)
    os.utime(script, (time.time() - 60,) * 2)
    assert first_failure.since(other, attempt) == "a"
    os.utime(script, (time.time() + 60,) * 2)
    assert first_failure.since(other, attempt) == "", "asked for again since"
