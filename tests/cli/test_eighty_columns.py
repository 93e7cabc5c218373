"""What people read while they work fits 80 columns, and says what it is for within them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.store import provenance, status
from harness.store.status import State, Status
from hydra_plugins.harness_hydra import StudySource
from tests.parity.arms import Arm, broken
from tests.parity.corpus import FP32, OURS
from tests.parity.edits import edit_json
from tests.parity.lab import as_study, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study: a control, a clean arm, one whose gradients are doubled, one that failed with a long reason."""
    store = tmp_path_factory.mktemp("store")
    bad: Arm = broken(replace(OURS, k=1), reduced=lambda mean, _, __: {name: 2 * grad for name, grad in mean.items()})
    control, clean, doubled, failed = (write(store, each) for each in (FP32, OURS, bad, replace(OURS, replicate=1)))
    as_study(store, {control: None, clean: control, doubled: control, failed: control}, "Is it the same? " * 9)
    for run in (control, clean, doubled, failed):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    status.note(failed, state=State.failed, reason=f"rank 0: ValueError: {'no luck ' * 20}")
    return store


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "words", [["watch", "lab"], ["verdict", "lab"], ["show", "RUN"], ["compare", "RUN", "RUN"], ["diff", "RUN", "RUN"]]
)
def test_every_line_fits(
    words: list[str], columns: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    doubled, control = (str(next(root.glob(f"lab/*{part}*"))) for part in ("native*k1", "ddp"))
    runs = iter((doubled, control))
    main([*(next(runs) if word == "RUN" else word for word in words), "--root", str(root)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    whole = re.compile(r"(arm +|control +|[ab]  |runs in )?\S*/|next: | +\S+$")  # what is typed or copied
    assert [line for line in lines if len(line) > columns and not whole.match(line)] == []


def test_watch_says_state_step_loss_and_time_of_every_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["watch", "lab", "--root", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["run", "state", "step", "loss", "ms/step"]
    names = sorted(path.parent.name for path in root.glob("lab/*/config.yaml"))
    for line, name in zip(lines[1:5], names, strict=True):
        assert re.match(rf"\S*{name[-8:]} +(done|failed) +12/12 +\d\.\d+ +\d+", line), line


def test_verdict_says_verdict_and_margin_of_every_arm(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verdict", "lab", "--root", str(root)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^\S+ +EQUAL +T1 +[\d.]+ % +\S+", out, re.M)
    assert re.search(r"^\S+ +DIFFERENT +T2 +\S+", out, re.M)


def test_what_comes_after_runs_that_are_no_study_is_no_verdict(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path, each) for each in (FP32, OURS)]
    assert main(["watch", "lab", "--root", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    told = re.fullmatch(rf"next: python -m harness compare (\w{{8}}) (\w{{8}}) --root {tmp_path}", last)
    assert told is not None, last
    assert set(told.groups()) == {run.name[-8:] for run in runs}


def test_studies_are_completed() -> None:
    found = StudySource("main", "study://sweeps").list("study", None)
    assert found == sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))


def test_a_status_without_a_mirror_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    written = status.write(tmp_path, Status(State.running, "r", 0))
    edit_json(tmp_path / "status.json")
    text = (tmp_path / "status.json").read_text().replace('  "mirror": "",\n', "")
    (tmp_path / "status.json").write_text(text)
    assert status.read(tmp_path) == written
