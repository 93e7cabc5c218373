"""A watched run's golden file, and a folder of watched runs: gate, verdict and report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from harness.parity.gate import gate, made
from harness.parity.outcome import Outcome
from harness.parity.record import load
from tests.capture import loops
from tests.capture.test_watch import DOWN, moved, scaled
from tests.support.spawn import run_ranks


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three watched runs and a baseline of one."""
    folder = tmp_path_factory.mktemp("runs") / "study"
    for name in ("single", "ddp", "hsdp"):
        run_ranks(loops.train, loops.LAYOUTS[name].ranks, name, folder / name)
    (folder.parent / "golden.npz").write_bytes(made(folder / "ddp"))
    return folder


def test_the_run_itself_is_equal_and_another_layout_equivalent(study: Path) -> None:
    golden = study.parent / "golden.npz"
    assert golden.stat().st_size < 200_000
    assert load(golden).is_watched
    assert gate(study / "ddp", golden).outcome is Outcome.EQUAL
    for name in ("single", "hsdp"):
        found = gate(study / name, golden)
        assert found.outcome is Outcome.EQUIVALENT, found.sentence
        assert "gradient distance, sketched" in {row.check for row in found.evidence}


@pytest.mark.parametrize(
    ("event", "at"),
    [
        ({"before_update": partial(scaled, DOWN, 1)}, 1),
        ({"before_update": partial(scaled, DOWN, 5)}, 5),
        ({"after_update": partial(moved, DOWN, 6)}, 6),
    ],
    ids=["gradient at step 1", "gradient at step 5", "update at step 6"],
)
def test_a_fault_does_not_pass_and_is_named(event: dict[str, Any], at: int, study: Path, tmp_path: Path) -> None:
    run = tmp_path / "study" / "faulty"
    run_ranks(partial(loops.train, **event), 2, "fsdp2", run)
    found = gate(run, study.parent / "golden.npz")
    assert found.outcome in (Outcome.DIFFERENT, Outcome.UNDECIDED), found.sentence
    assert found.outcome is Outcome.DIFFERENT or at > 1
    assert f"at step {at}, " in found.sentence
    assert DOWN in found.sentence


def test_bits_are_not_demanded_of_another_program(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", str(study.parent / "golden.npz"), str(study / "ddp"), "--bitwise"]) == 2
    assert "promises no bits" in capsys.readouterr().err


def test_a_folder_of_watched_runs_is_judged_and_reported(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = [str(study), "--control", str(study / "ddp")]
    assert main(["verdict", *words]) == 0
    told = capsys.readouterr().out
    assert "EQUIVALENT: runs held against one control, 2 comparisons" in told
    assert main(["report", *words]) == 0
    page = (study / "report.html").read_text()
    assert all(name in page for name in ("single", "hsdp", "EQUIVALENT"))
    assert main(["report", str(study)]) == 0
    assert "--control RUN says which" in (study / "report.html").read_text()
