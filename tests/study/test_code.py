"""Versions of the code as files: what a revision stands for, and that nothing of the user's is touched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import revisions
from harness.config.errors import BadRequest
from harness.revisions import WORKTREE, Repository
from tests.support.needs import skip_without


def git(folder: Path, *words: str) -> str:
    skip_without("git")
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, text: str, subject: str) -> str:
    (folder / "file.py").write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A repository with three commits."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".gitignore").write_text("/runs/\n__pycache__/\n")
    for number in range(3):
        commit(folder, f"{number}\n", f"Commit {number}")
    return folder


@pytest.fixture
def repository(top: Path) -> Repository:
    return Repository(top, top / "runs" / revisions.FOLDER)


def test_a_revision_becomes_its_own_files(repository: Repository) -> None:
    old, new = repository.version("HEAD~1"), repository.version("main")
    assert new.label == f"main ({new.commit[:7]})"
    files = repository.files(old)
    assert (files / "file.py").read_text() == "1\n"
    assert repository.files(old) == files
    assert (repository.files(new) / "file.py").read_text() == "2\n"
    assert not list(repository.cache.glob("*/.files*")), "no drafts are left"


def test_the_working_tree_is_a_version_and_stays_as_it_is(repository: Repository, top: Path) -> None:
    (top / "file.py").write_text("dirty\n")
    (top / "new name\n.py").write_text("new\n")
    (top / ".gitignore").write_text("/ignored\n__pycache__/\n")  # the store is hidden also where git does not ignore it
    (top / "ignored").write_text("never\n")
    (top / "runs").mkdir()
    (top / "runs" / "big").write_text("a run\n")
    (top / "staged.py").write_text("staged\n")
    git(top, "add", "staged.py")
    before = git(top, "status", "--porcelain"), git(top, "stash", "list")
    index = (top / ".git" / "index").read_bytes()
    version = repository.version(WORKTREE)
    files = repository.files(version)
    assert sorted(path.name for path in files.iterdir()) == [".gitignore", "file.py", "new name\n.py", "staged.py"]
    assert (files / "file.py").read_text() == "dirty\n"
    assert (top / ".git" / "index").read_bytes() == index
    assert (git(top, "status", "--porcelain"), git(top, "stash", "list")) == before


def test_a_clean_working_tree_is_head(repository: Repository) -> None:
    assert repository.version(WORKTREE).tree == repository.version("HEAD").tree


@pytest.mark.parametrize("revision", ["nope", "main..HEAD", "", "-h", "--all", "HEAD:file.py", "HEAD^{tree}"])
def test_what_is_no_commit_is_refused(repository: Repository, revision: str) -> None:
    with pytest.raises(BadRequest, match=r"is no commit of this repository"):
        repository.version(revision)


def test_code_outside_a_checkout_has_one_version(tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the place it is installed in happens to lie inside somebody's repository."""
    for home in (tmp_path / "site-packages", top / "venv"):
        (home / "harness").mkdir(parents=True)
        monkeypatch.setattr(revisions, "PACKAGE", home / "harness")
        with pytest.raises(BadRequest, match="no git checkout of its own"):
            Repository.own(tmp_path / "runs")
    monkeypatch.setattr(revisions, "PACKAGE", top / "harness")
    assert Repository.own(tmp_path / "runs").top == top


def test_a_hooks_variables_lead_nowhere(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert (repository.files(repository.version("HEAD")) / "file.py").read_text() == "2\n"


def test_two_who_write_one_version_get_the_same(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    version = repository.version("HEAD")
    rename = revisions.os.rename

    def meanwhile(draft: Path, target: Path) -> None:
        monkeypatch.setattr(revisions.os, "rename", rename)
        repository.files(version)
        rename(draft, target)

    monkeypatch.setattr(revisions.os, "rename", meanwhile)
    assert (repository.files(version) / "file.py").read_text() == "2\n"
    assert [path.name for path in repository.folder(version).iterdir()] == ["files"]
