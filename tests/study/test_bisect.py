"""Bisection over versions: with runs of the simulated engine, and once with real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bisect import history, revisions
from harness.bisect.history import BAD, GOOD, SKIP, Culprit, Request, answer_of, bisect, compare_code
from harness.bisect.revisions import WORKTREE, Version
from harness.config.errors import BadRequest, refuse
from harness.parity import Finding, Grade, Outcome, Stage, Verdict
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
        self.ran.append(self.version.subject)
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
    monkeypatch.setattr(history, "Snapshot", ToySnapshot)
    monkeypatch.setattr(ToySnapshot, "ran", [])
    return top


def grow(top: Path, *kinds: str) -> None:
    """A commit a kind, each with files of its own."""
    for number, kind in enumerate(kinds):
        commit(top, f"{kind}: {number}\n", f"{number} {kind}")


def found(good: str, bad: str, told: list[str] | None = None) -> Culprit:
    return bisect(Request(("train.steps=3",)), good, bad, (told if told is not None else []).append)


def test_the_commit_that_doubles_gradients_is_named_with_what_shows_it(toy: Path) -> None:
    grow(toy, "clean", "harmless", "harmless", "doubled", "doubled", "doubled", "doubled", "doubled")
    told: list[str] = []
    culprit = found("main~7", "main", told)
    assert culprit.first.subject == "3 doubled"
    assert culprit.verdict.outcome is Outcome.DIFFERENT
    assert culprit.sentence.startswith(f"{culprit.first.commit[:7]} '3 doubled' is the first that differs: DIFFERENT: ")
    assert (culprit.same.subject, culprit.skipped) == ("2 harmless", ())
    assert 2 + 2 <= len(ToySnapshot.ran) <= 2 + 3, "both ends, and log2(7) trials"
    assert sum(line.startswith("  ") and "the end" not in line for line in told) == len(ToySnapshot.ran) - 2, (
        "a line a trial"
    )
    assert all("\n" not in line for line in told)
    ToySnapshot.ran.clear()
    assert found("main~7", "main") == culprit
    assert ToySnapshot.ran == [], "asked again, done runs are used again"


def test_two_names_of_one_version_are_equal_and_nothing_is_run(toy: Path) -> None:
    """What a fresh clone makes of `compare --code main WORKTREE`."""
    grow(toy, "clean", "doubled")
    compared = compare_code(Request(("train.steps=3",)), "main", WORKTREE, pytest.fail)
    assert compared.verdict.exit_code == 0
    assert "hold the same files" in compared.verdict.sentence
    before = git(toy, "rev-parse", "HEAD~1")[:7]
    assert compared.verdict.commands == (f"python -m harness compare --code {before} WORKTREE train.steps=3",)
    assert ToySnapshot.ran == []


def test_commits_that_cannot_be_tried_are_skipped_and_reported(toy: Path) -> None:
    grow(toy, "clean", "broken", "fails", "doubled", "doubled")
    culprit = found("main~4", "main")
    assert culprit.first.subject == "3 doubled"
    assert [version.subject for version, _ in culprit.skipped] == ["1 broken", "2 fails"]
    broken, fails = (why for _, why in culprit.skipped)
    assert "It is broken" in broken
    assert "failed, not done (no luck)" in fails
    assert "is the first that is known to differ, after 2 that could not be tried" in culprit.sentence


def test_other_data_hides_a_difference_of_numbers_and_is_one_where_it_is_the_end(toy: Path) -> None:
    grow(toy, "clean", "other data", "doubled", "clean", "other data", "other data")
    assert [version.subject for version, _ in found("main~5", "main~3").skipped] == ["1 other data"]
    culprit = found("main~2", "main")
    assert culprit.first.subject == "4 other data"
    assert culprit.verdict.outcome is Outcome.NOT_COMPARABLE


def test_files_that_are_goods_own_are_not_tried(toy: Path) -> None:
    grow(toy, "clean", "harmless")
    commit(toy, "clean: 0\n", "Back again")
    grow(toy, "doubled")
    assert found("main~3", "main").first.subject == "0 doubled"
    assert "Back again" not in ToySnapshot.ran


def test_the_working_tree_can_be_the_bad_end(toy: Path) -> None:
    grow(toy, "clean", "harmless")
    (toy / "file.py").write_text("doubled: here\n")
    culprit = found("main~1", WORKTREE)
    assert (culprit.same.commit, culprit.first.asked) == (git(toy, "rev-parse", "HEAD"), WORKTREE)


@pytest.mark.parametrize(
    ("kinds", "good", "bad", "says"),
    [
        (["clean", "harmless"], "main~1", "main", "does not differ from main~1"),
        (["clean", "broken"], "main~1", "main", "It is broken"),
        (["broken", "clean"], "main~1", "main", "It is broken"),
        (["clean", "fails"], "main~1", "main", r"cannot be held against main~1(?s:.*)no luck"),
        (["fails", "clean"], "main~1", "main", r"cannot be held against main~1(?s:.*)no luck"),
        (["clean", "doubled"], "main", "main~1", r"not built on the first(?s:.*)bisect \w{7} \w{7}"),
        (["clean", "doubled"], "main", "main", "names the same files twice"),
        (["clean", "doubled"], WORKTREE, "main", "can be the bad end alone"),
    ],
)
def test_ends_that_make_no_search_are_refused(toy: Path, kinds: list[str], good: str, bad: str, says: str) -> None:
    grow(toy, *kinds)
    with pytest.raises(BadRequest, match=says):
        found(good, bad)


def test_versions_are_compared_and_the_next_command_asks_the_same(toy: Path) -> None:
    grow(toy, "clean", "doubled")
    told: list[str] = []
    compared = compare_code(Request(("train.steps=3",), "runs"), "main~1", "main", told.append)
    assert compared.verdict.outcome is Outcome.DIFFERENT
    assert compared.verdict.commands[0].endswith(f"--tensor {compared.verdict.findings[0].tensor}")
    assert ToySnapshot.ran == ["0 clean", "1 doubled"], "the old one first: it is the control"


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


def verdict(outcome: Outcome, check: str = "", stage: Stage = Stage.record) -> Verdict:
    """A verdict with one finding."""
    failed = (Finding("T0", check, stage, Grade.bad, "a", "b"),) if check else ()
    return Verdict(outcome, f"{outcome.value}: because.", "arm", "control", "T0", "", failed, failed)


@pytest.mark.parametrize(
    ("judged", "sought", "answer"),
    [
        (verdict(Outcome.EQUAL), Outcome.DIFFERENT, GOOD),
        (verdict(Outcome.EQUIVALENT), Outcome.DIFFERENT, GOOD),
        (verdict(Outcome.DIFFERENT), Outcome.DIFFERENT, BAD),
        (verdict(Outcome.DIFFERENT), Outcome.NOT_COMPARABLE, BAD),
        (verdict(Outcome.UNDECIDED), Outcome.DIFFERENT, SKIP),
        (verdict(Outcome.NOT_COMPARABLE, "data_digest", Stage.data), Outcome.DIFFERENT, SKIP),
        (verdict(Outcome.NOT_COMPARABLE, "data_digest", Stage.data), Outcome.NOT_COMPARABLE, BAD),
        (verdict(Outcome.NOT_COMPARABLE, "train.seed"), Outcome.NOT_COMPARABLE, BAD),
        (verdict(Outcome.NOT_COMPARABLE, "whole record"), Outcome.NOT_COMPARABLE, SKIP),
        (verdict(Outcome.NOT_COMPARABLE, "torch version"), Outcome.NOT_COMPARABLE, SKIP),
    ],
)
def test_what_a_verdict_says_to_a_search(judged: Verdict, sought: Outcome, answer: str) -> None:
    assert answer_of(judged, sought) == answer


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
    wrong = right.replace("factor=1.0 / ground.divisor", "factor=1.02 / ground.divisor")
    assert wrong != right, "the engine divides elsewhere now: this test must follow"
    for subject, text in (("Comment", f"{right}# a\n"), ("Tidy up", f"{wrong}# a\n"), ("Another", f"{wrong}# b\n")):
        engine.write_text(text)
        commit(top, "", subject)
    return top


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wrong_factor_is_found_in_a_real_history(project: Path) -> None:
    done = harness(project, "-m", "harness", "bisect", "main~3", "main", *ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    *answer, reproduce = done.stdout.splitlines()
    answer = " ".join(" ".join(answer).split())  # it is broken into lines
    assert "'Tidy up' is the first that differs: DIFFERENT: " in answer
    assert "2 %" in answer
    words = reproduce.removeprefix("next: python ").split()
    again = harness(project, *words, "--json")
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stderr.count("was run") == 2, "the runs of the search are used again"
    assert git(project, "status", "--porcelain") == ""
    unknown = harness(project, "-m", "harness", "compare", "--code", "main~1", "main", "train.stepz=2")
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert "train.stepz: train has no such setting" in unknown.stderr
