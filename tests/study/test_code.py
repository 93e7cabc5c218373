"""Versions of the code as files: what a revision stands for, and that nothing of the user's is touched; and a real
history, by `git bisect run`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import revisions
from harness.config.errors import BadRequest
from harness.revisions import WORKTREE, Repository
from tests.support.needs import skip_without

ROOT = Path(__file__).parents[2]


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


ALONE = (
    *("train.steps=2", "train.warmup_steps=0", "train.global_batch_size=8", "train.microbatch_size=2", "mesh=one"),
    *("model.num_layers=1", "data=synthetic", "data.seq_len=16", "ckpt=none", "sharding=optim"),
)
"""A version is a process of its own: one rank in it is the least that trains."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """This project as it is now, as a repository of four commits, one of which divides gradients wrongly."""
    top = tmp_path / "project"
    top.mkdir()
    for name in ("harness", "conf", "sweeps", "hydra_plugins"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.py", ".gitignore"):
        shutil.copy(ROOT / name, top / name)
    git(top, "init", "--quiet", "--initial-branch=main")
    commit(top, "", "Begin")
    engine = top / "harness" / "fsdp" / "build.py"
    right = engine.read_text()
    wrong = right.replace("factor=1.0 / self.divisor", "factor=1.02 / self.divisor")
    assert wrong != right, "the engine divides elsewhere now: this test must follow"
    for subject, text in (("Comment", f"{right}# a\n"), ("Tidy up", f"{wrong}# a\n"), ("Another", f"{wrong}# b\n")):
        engine.write_text(text)
        commit(top, "", subject)
    return top


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wrong_factor_is_found_in_a_real_history(project: Path) -> None:
    """By the lines that docs/bisect.md prints."""
    block = (ROOT / "docs/bisect.md").read_text().partition("## The commit\n")[2].split("```")[1]
    lines = block.replace("HEAD v1.2", "main main~3").replace("--code v1.2", "--code main~3")
    script = lines.replace("train.steps=20", shlex.join(ALONE)).replace("python", sys.executable)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(["bash", "-ec", script], cwd=project, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    culprit = git(project, "rev-parse", "main~1")
    assert f"{culprit} is the first bad commit" in done.stdout
    assert "2 %" in done.stdout
    assert git(project, "status", "--porcelain") == ""
