"""Small files whole or not at all, and locks that know who lives."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from harness.store import files
from harness.store.errors import StoreError
from harness.store.files import Lock, held, is_held, write_atomic, write_json
from tests.support.disk import small_disk


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, broken):
    path = tmp_path / "a"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a", {"loss": float("nan")})


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / ".lock"
    assert not is_held(path)
    lock = Lock.acquire(path)
    assert lock is not None
    assert Lock.acquire(path) is None
    assert is_held(path)
    lock.release()
    lock.release()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # somebody else who looks at this very moment
        assert not is_held(path)


def test_an_archive_can_be_looked_at(tmp_path):
    with small_disk(tmp_path, 1) as disk:
        (disk / ".lock").touch()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (disk / "new").touch()
        assert not is_held(disk / ".lock")


def test_bookkeeping_waits_and_then_says_for_what(tmp_path):
    path = tmp_path / ".lock"
    with (
        held(path),
        pytest.raises(StoreError, match=r"\.lock has been locked by another process for 0\.1 s"),
        held(path, timeout_s=0.1),
    ):
        pass
    with held(path):
        pass


@pytest.mark.parametrize("passed", [True, False])
def test_a_child_that_is_given_the_lock_keeps_it_and_no_other_does(tmp_path, passed):
    path = tmp_path / ".lock"
    lock = Lock.acquire(path)
    assert lock is not None
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    given = (lock.fileno(),) if passed else ()
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=given) as child:
        lock.release()
        assert is_held(path) is passed
        assert child.stdin is not None
        child.stdin.close()
    assert not is_held(path)
