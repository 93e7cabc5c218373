"""Versions of the code compared: with runs of the simulated engine, and once with real ones, by `git bisect run`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import revisions
from harness.config.errors import BadRequest, refuse
from harness.parity import Outcome
from harness.revisions import WORKTREE, Request, Version, compare_code
from tests.parity.arms import Arm, broken
from tests.parity.edits import edit_json
from tests.parity.lab import write
from tests.study.test_code import commit, git

ROOT = Path(__file__).parents[2]
PLAIN = Arm(steps=3, updates=())
DOUBLED = broken(PLAIN, reduced=lambda mean, own, arm: {name: 2 * value for name, value in mean.items()})
ARMS = {
    "clean": PLAIN,
    "harmless": PLAIN,
    "doubled": DOUBLED,
    "other data": broken(PLAIN, same_data=True),
    "fails": PLAIN,
}
"""What a commit of the toy project does, by the first words of its file."""


class ToySnapshot:
    """Stands for a version at work: what it does is written in its one file."""

    ran: list[str] = []  # noqa: RUF012

    def __init__(self, repository: revisions.Repository, version: Version) -> None:
        self.version = version
        self.folder = repository.folder(version)
        self.kind = (repository.files(version) / "file.py").read_text().partition(":")[0]

    def check(self, words: tuple[str, ...]) -> None:
        if self.kind == "broken":
            raise refuse(self.version.label, "cannot do what is asked. It is broken")

    def log(self, words: tuple[str, ...]) -> Path:
        return self.folder / "log"

    def done(self, words: tuple[str, ...]) -> Path | None:
        return next((path.parent for path in self.folder.glob("runs/*/*/config.yaml")), None)

    def run(self, words: tuple[str, ...]) -> Path:
        self.check(words)
        if (done := self.done(words)) is not None:
            return done
        self.ran.append(self.version.word)
        run = write(self.folder / "runs", ARMS[self.kind])
        edit_json(run / "provenance.json", sources_digest=self.version.tree.ljust(64, "0"))
        if self.kind == "fails":
            edit_json(run / "status.json", state="failed", reason="no luck")
        return run


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project whose versions are simulated."""
    top = tmp_path / "toy"
    top.mkdir()
    git(top, "init", "--quiet", "--initial-branch=main")
    (top / ".gitignore").write_text("/runs/\n")
    monkeypatch.chdir(top)
    monkeypatch.setattr(revisions, "PACKAGE", top / "harness")
    monkeypatch.setattr(revisions, "Snapshot", ToySnapshot)
    monkeypatch.setattr(ToySnapshot, "ran", [])
    return top


def grow(top: Path, *kinds: str) -> None:
    """A commit a kind, each with files of its own."""
    for number, kind in enumerate(kinds):
        commit(top, f"{kind}: {number}\n", f"{number} {kind}")


def test_two_names_of_one_version_are_refused_and_nothing_is_run(toy: Path) -> None:
    """What a fresh clone makes of `compare --code main WORKTREE`."""
    grow(toy, "clean", "doubled")
    with pytest.raises(BadRequest, match="hold the same files"):
        compare_code(Request(("train.steps=3",)), "main", WORKTREE, pytest.fail)
    assert ToySnapshot.ran == []


def test_versions_are_compared_and_the_next_command_asks_the_same(toy: Path) -> None:
    grow(toy, "clean", "doubled")
    told: list[str] = []
    compared = compare_code(Request(("train.steps=3",), "runs"), "main~1", "main", told.append)
    assert compared.outcome is Outcome.DIFFERENT
    assert compared.commands[0].endswith(f"--tensor {compared.findings[0].tensor}")
    assert ToySnapshot.ran == [git(toy, "rev-parse", each)[:7] for each in ("main~1", "main")], "the control first"


def test_nothing_is_run_where_one_version_does_not_compose(toy: Path) -> None:
    grow(toy, "clean", "broken")
    with pytest.raises(BadRequest, match=r"main \(\w{7}\): cannot do what is asked. It is broken"):
        compare_code(Request(), "main~1", "main", [].append)
    assert ToySnapshot.ran == []


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(("launch.root=/x",)), "stores of their own"),
        (Request(("launch.dry_run=true",)), "needs runs"),
        (Request(("train.steps=2",), bitwise=True), "numerics=fast promises no order"),
        (Request(("numerics=fast",), bitwise=True), "numerics=fast promises no order"),
    ],
)
def test_what_no_version_can_answer_is_refused(toy: Path, request_: Request, says: str) -> None:
    grow(toy, "clean", "doubled")
    with pytest.raises(BadRequest, match=says):
        compare_code(request_, "main~1", "main", [].append)


SMALL = (
    "train.steps=2",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=2",
    "model.num_layers=1",
    "data=synthetic",
    "data.seq_len=16",
    "ckpt=none",
    "sharding=optim",
)


ALONE = (*SMALL, "mesh=one")
"""A version is a process of its own: one rank in it is the least that trains."""


def harness(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line of the project in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)


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
    unknown = harness(project, "-m", "harness", "compare", "--code", "main~1", "main", "train.stepz=2")
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert "train.stepz: train has no such setting" in unknown.stderr
