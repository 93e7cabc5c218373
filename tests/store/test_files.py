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
from harness.store.reading import read_json
from tests.support.disk import small_disk


def test_replaces_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, "old")
    write_atomic(path, "new\n")
    assert path.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["a"]


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


def test_json_that_was_edited_by_hand_is_named(tmp_path):
    path = tmp_path / "status.json"
    assert read_json(path) is None
    path.write_text("{")
    with pytest.raises(StoreError, match=r"status\.json is not valid JSON"):
        read_json(path)


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
    assert not is_held(path)


def test_looking_at_a_lock_is_no_holding(tmp_path):
    path = tmp_path / ".lock"
    path.touch()
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


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path):
    path = tmp_path / ".lock"
    lock = Lock.acquire(path)
    assert lock is not None
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)) as child:
        lock.release()
        assert is_held(path)
        assert child.stdin is not None
        child.stdin.close()
    assert not is_held(path)


def test_a_child_does_not_inherit_it_by_accident(tmp_path):
    path = tmp_path / ".lock"
    lock = Lock.acquire(path)
    assert lock is not None
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        lock.release()
        assert not is_held(path)
        assert child.stdin is not None
        child.stdin.close()
