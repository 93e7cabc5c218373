"""Code as it was when a job was submitted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.launch import opening
from harness.launch.opening import code_copy, own_copy
from harness.store.provenance import files_digest, sources_digest


@pytest.fixture
def origin(tmp_path):
    folder = tmp_path / "checkout"
    (folder / "harness" / "__pycache__").mkdir(parents=True)
    (folder / "harness" / "__init__.py").write_text("WORD = 'then'\n")
    (folder / "harness" / "__pycache__" / "x.pyc").write_text("")
    (folder / "run.py").write_text("")
    (folder / "notes.txt").write_text("not shipped")
    return folder


def test_edits_after_it_was_taken_change_nothing(tmp_path, origin):
    taken = code_copy(tmp_path / "runs", origin, take=True)
    assert code_copy(tmp_path / "runs", origin, take=True) == taken, "the same code is one copy"
    assert taken.parent == tmp_path / "runs" / ".snapshots"
    (origin / "harness" / "__init__.py").write_text("WORD = 'now'\n")
    command = [sys.executable, "-P", "-c", "import harness; print(harness.WORD)"]
    done = subprocess.run(
        command, cwd=origin, env={"PYTHONPATH": f"{taken}:{origin}"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "then\n"
    files = sorted(path.relative_to(taken).as_posix() for path in taken.rglob("*.*") if path.is_file())
    assert [name for name in files if "__pycache__" not in name] == ["harness/__init__.py", "run.py"]
    assert code_copy(tmp_path / "runs", origin, take=False) != taken


def test_the_real_one_has_the_sources_of_this_process(tmp_path):
    taken = code_copy(tmp_path, take=True)
    assert sources_digest(taken / "harness") == sources_digest()
    assert {path.name for path in taken.iterdir()} == {name.partition("/")[0] for name in opening.SHIPPED}


def test_what_is_ones_own_is_copied_too(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    facts = {
        "name": "mine:A",
        "root": str(tmp_path),
        "files": ["mine.py"],
        "digest": files_digest(tmp_path, ["mine.py"]),
    }
    held = own_copy(tmp_path / "runs", facts)
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert held | {"copy": ""} == facts | {"copy": ""}
    assert (tmp_path / "runs" / ".snapshots" / f"own-{facts['digest'][:16]}" / "mine.py").read_text() == "x = 1\n"
