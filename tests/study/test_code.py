"""Versions of the code as files: what a revision stands for, and that nothing of the user's is touched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.bisect import revisions
from harness.bisect.revisions import WORKTREE, Repository, Version
from harness.config.errors import BadRequest
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


def test_a_revision_becomes_its_own_read_only_files(repository: Repository) -> None:
    old, new = repository.version("HEAD~1"), repository.version("main")
    assert (old.subject, new.label) == ("Commit 1", f"main ({new.commit[:7]})")
    files = repository.files(old)
    assert (files / "file.py").read_text() == "1\n"
    assert not (files / "file.py").stat().st_mode & 0o222
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
    assert not repository.is_dirty()


def test_a_branch_that_a_clone_has_of_its_origin_alone(top: Path, tmp_path: Path) -> None:
    git(top, "branch", "side", "HEAD~1")
    git(tmp_path, "clone", "--quiet", str(top), "clone")
    clone = Repository(tmp_path / "clone", tmp_path / "clone" / "runs" / revisions.FOLDER)
    assert clone.version("side").commit == git(top, "rev-parse", "HEAD~1")


@pytest.mark.parametrize("revision", ["nope", "main..HEAD", "", "-h", "--all", "HEAD:file.py", "HEAD^{tree}"])
def test_what_is_no_commit_is_refused_with_the_branches_there_are(repository: Repository, revision: str) -> None:
    with pytest.raises(BadRequest, match=r"is no commit of this repository(?s:.)*a branch \(main\)"):
        repository.version(revision)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ("", [0, 1]),
        ("b", [0, 1]),
        ("g", [1, 2]),
        ("s", [0, 1, 2]),
        ("ggggb", [4, 5]),
        ("gsssb", [1, 2, 3, 4, 5]),
        ("sbbb", [0, 1, 2]),
    ],
)
def test_git_finds_the_first_bad_version(top: Path, repository: Repository, answers: str, found: list[int]) -> None:
    """One letter each version between the ends: good, bad or skipped."""
    line = [commit(top, f"here {number}\n", f"Line {number}") for number in range(len(answers) + 2)]
    git(top, "bisect", "start")
    names = {"g": "good", "b": "bad", "s": "skip"}
    asked: list[str] = []

    def answer(version: Version) -> str:
        asked.append(version.commit)
        return names[answers[line.index(version.commit) - 1]]

    ends = repository.version(line[0]), repository.version(line[-1])
    span = repository.bisect(*ends, answer)
    assert [line.index(each.commit) for each in span] == found
    assert len(asked) == len(set(asked))
    assert not {line[0], line[-1]} & set(asked)
    assert "start" in git(top, "bisect", "log"), "a bisection of the user's goes on"


def test_a_merge_is_one_step(repository: Repository, top: Path) -> None:
    git(top, "checkout", "--quiet", "-b", "side", "HEAD~1")
    side = commit(top, "side\n", "On the side")
    git(top, "checkout", "--quiet", "main")
    git(top, "merge", "--quiet", "--strategy=ours", "side", "--message", "Merge")
    last = commit(top, "last\n", "Last")
    seen: list[str] = []

    def answer(version: Version) -> str:
        seen.append(version.subject)
        return "bad" if version.subject == "Merge" else "good"

    span = repository.bisect(repository.version("main~3"), repository.version(last), answer)
    assert [each.subject for each in span] == ["Commit 2", "Merge"]
    assert "On the side" not in seen
    assert repository.parents(span[1])[1] == side[:7]


def test_code_outside_a_checkout_has_one_version(tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the place it is installed in happens to lie inside somebody's repository."""
    for home in (tmp_path / "site-packages", top / "venv"):
        (home / "harness").mkdir(parents=True)
        monkeypatch.setattr(revisions, "PACKAGE", home / "harness")
        with pytest.raises(BadRequest, match="no git checkout of its own"):
            Repository.own(tmp_path / "runs")
    monkeypatch.setattr(revisions, "PACKAGE", top / "harness")
    assert Repository.own(tmp_path / "runs").top == top
    with pytest.raises(BadRequest, match="PYTHONPATH"):
        Repository.own(tmp_path / "a:b")


def test_a_hooks_variables_lead_nowhere(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert (repository.files(repository.version("HEAD")) / "file.py").read_text() == "2\n"


def test_two_who_write_one_version_get_the_same(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    version = repository.version("HEAD")
    protect = revisions._protect

    def meanwhile(folder: Path) -> None:
        monkeypatch.setattr(revisions, "_protect", protect)
        repository.files(version)
        protect(folder)

    monkeypatch.setattr(revisions, "_protect", meanwhile)
    assert (repository.files(version) / "file.py").read_text() == "2\n"
    assert [path.name for path in repository.folder(version).iterdir()] == ["files"]
