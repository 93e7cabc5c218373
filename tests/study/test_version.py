"""A version at work: whose files run, what is made of its refusals, and that one run serves all who ask."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from harness import revisions
from harness.config.errors import BadRequest
from harness.revisions import FOLDER, WORKTREE, Repository, Request, Snapshot, compare_code
from harness.store import provenance
from tests.study.test_code import commit, git

RUN = """
import json, os, pathlib, subprocess, sys, time
import harness
words = dict(word.split("=", 1) for word in sys.argv[1:])
if words.get("say") == "refused":
    print("noise\\nbad request:\\n  say=refused: is not said")
    sys.exit(2)
if words.get("say") == "broken":
    raise ImportError("no such thing")
if words.get("launch.dry_run") == "true":
    sys.exit(0)
run = pathlib.Path(words["launch.root"].strip("'")) / "adhoc" / "a-12345678"
run.mkdir(parents=True, exist_ok=True)
with open(run / "starts", "a") as starts:
    starts.write(pathlib.Path(harness.__file__).parent.parent.name + "\\n")
time.sleep(float(words.get("sleep", 0)))
head = subprocess.run(["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"], capture_output=True, text=True)
(run / "config.yaml").write_text("study: {name: adhoc}\\n")
(run / "provenance.json").write_text(json.dumps({"git": None, "seen": head.stdout, "rank": os.environ.get("RANK")}))
state = "failed" if words.get("say") == "failed" else "done"
(run / "status.json").write_text(json.dumps({"state": state, "reason": "", "attempt": 0, "keeper": "process"}))
sys.exit(state == "failed")
"""


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a harness of its own, whose store lies inside it."""
    folder = tmp_path / "project"
    (folder / "harness").mkdir(parents=True)
    (folder / "harness" / "__init__.py").touch()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".gitignore").write_text("/runs/\n")
    commit(folder, "", "Before run.py")
    (folder / "run.py").write_text(RUN)
    commit(folder, "", "With run.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    return folder


def snapshot(top: Path, revision: str = "main") -> Snapshot:
    repository = Repository(top, top / "runs" / FOLDER)
    return Snapshot(repository, repository.version(revision))


def starts(run: Path) -> list[str]:
    return (run / "starts").read_text().split()


def test_its_own_files_run_once_and_know_their_commit(top: Path) -> None:
    version = snapshot(top)
    version.check(["a=b"])
    run = version.run(["a=b"])
    assert starts(run) == ["files"]
    assert version.run(["a=b"]) == run
    assert starts(run) == ["files"], "done before"
    origin = provenance.read(run)
    assert origin["git"]["sha"] == git(top, "rev-parse", "HEAD")
    assert origin["seen"] == "", "the repository around the store is not the version's"
    assert origin["rank"] is None
    assert version.run(["a=c"]) != run


@pytest.mark.parametrize(
    ("say", "told"), [("refused", "say=refused: is not"), ("broken", "ImportError: no such thing")]
)
def test_refusals_speak_in_the_versions_own_words(top: Path, say: str, told: str) -> None:
    for ask in (snapshot(top).run, snapshot(top).check):
        with pytest.raises(BadRequest, match=rf"main \(\w{{7}}\): cannot do what is asked(?s:.)*{told}"):
            ask([f"say={say}"])


def test_a_package_that_python_takes_from_elsewhere_is_refused(top: Path) -> None:
    git(top, "rm", "--quiet", "-r", "harness")
    commit(top, "", "Without a package")
    with pytest.raises(BadRequest, match="is not what Python imports from its own files"):
        snapshot(top)


def test_nothing_is_run_of_two_names_of_one_version_or_where_one_does_not_compose(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is what a fresh clone makes of `compare --code main WORKTREE`."""
    monkeypatch.setattr(revisions, "PACKAGE", top / "harness")
    root = str(top / "runs")
    with pytest.raises(BadRequest, match="hold the same files"):
        compare_code(Request(("a=b",), root), "main", WORKTREE, pytest.fail)
    (top / "run.py").write_text("raise ImportError('it is broken')\n")
    with pytest.raises(BadRequest, match=r"WORKTREE \(on \w{7}\): cannot do what is asked(?s:.)*it is broken"):
        compare_code(Request(("a=b",), root), "main", WORKTREE, pytest.fail)
    assert not list(top.rglob("starts"))


def test_two_requests_at_once_make_one_run(top: Path) -> None:
    version = snapshot(top)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(version.run(["sleep=0.5"]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1]
    assert starts(found[0]) == ["files"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_us_stops_the_run(top: Path, number: signal.Signals) -> None:
    version = snapshot(top)
    begun = top / "runs" / FOLDER

    def stop() -> None:
        deadline = time.monotonic() + 30
        while not any(begun.glob("*/runs/*/adhoc/*/starts")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        version.run(["sleep=60"])
    assert time.monotonic() - before < 30
