"""Machines that broke runs, and runs that others need not follow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.store import first_failure, nodes
from harness.store.rundir import RunDir


def test_a_node_that_broke_two_starts_is_left_out(tmp_path: Path) -> None:
    assert nodes.excluded(tmp_path) == ()
    for _ in range(3):
        nodes.blame(tmp_path, "n1", "s/a", "7.0", "ECC error")
    assert nodes.excluded(tmp_path) == (), "one start, told by three ranks"
    nodes.blame(tmp_path, "n2", "s/a", "7.1", "down")
    nodes.blame(tmp_path, "n1", "s/b", "7.0", "down")
    assert nodes.excluded(tmp_path) == ("n1",)


def test_a_damaged_record_hides_nothing_and_orders_nothing(tmp_path: Path) -> None:
    nodes.blame(tmp_path, "n1", "s/a", "7.0", "x")
    with (tmp_path / nodes.FILE).open("a") as file:
        file.write(
            '{"node": "n9 --uid=0", "run": "s/a", "start": "1"}\n{"node": "n9 --uid=0", "run": "s/b", "start": "1"}\n'
        )
        file.write('[]\n{"node": 3}\n{"no')
        file.write("\n")
    nodes.blame(tmp_path, "n1", "s/a", "7.1", "x")
    assert nodes.excluded(tmp_path) == ("n1",)


@pytest.mark.parametrize(
    ("message", "machine"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("OSError: [Errno 5] Input/output error: '/data'", True),
        ("RuntimeError: CUDA error: unspecified launch failure", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("ValueError: bad step 3", False),
        ("RuntimeError: Connection closed by peer", False),
    ],
)
def test_whom_an_error_blames(message: str, machine: bool) -> None:
    assert nodes.is_of_the_machine(message) is machine


def test_a_jobs_only_node_is_to_blame_and_of_several_those_that_are_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\nprintf 'n1|idle\\nn2|down*\\nn3|allocated*\\nn4|mixed\\n'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert nodes.broken("n1") == ["n1"]
    assert nodes.broken("n[1-4]") == ["n2", "n3"]
    assert nodes.broken("n1", alone=False) == ["n2", "n3"], "whatever sinfo says of those it was asked about"
    assert nodes.broken("") == []


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
