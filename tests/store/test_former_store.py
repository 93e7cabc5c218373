"""Runs of the version before, whose captures have a file and a description a kind, are read by every verb."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.parity import compare
from harness.parity.outcome import Outcome
from harness.parity.record import Record, load
from tests.cli.test_damaged_runs import CODES

ARCHIVE = Path(__file__).with_name("former_store.tar.xz")
"""Two runs of four steps of 1,000 weights, one held against the other: made at dc3a6075, paths in it replaced."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "former"


@pytest.fixture
def pair(root: Path) -> tuple[Path, Path]:
    (arm,), (control,) = (list((root / "parity_pair").glob(f"*-{engine}-*")) for engine in ("native", "single"))
    return arm, control


def test_a_former_run_is_read_whole(pair: tuple[Path, Path]) -> None:
    found: Record = load(pair[0])
    assert (found.files, found.problems) == ("whole", ())
    steps = [sorted(each) for each in (found.captures, found.updates, found.weights, found.witnesses, found.moments)]
    assert steps == [[1, 3, 4], [1, 3, 4], [1, 3], [1, 3, 4], [3]]
    assert found.forward is not None
    assert found.stream is not None


def test_its_verdict_is_what_it_was(pair: tuple[Path, Path]) -> None:
    verdict = compare(*pair, sources=None)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert {"update by the rule", "sum of local gradients", "output of a module"} <= {
        finding.check for finding in verdict.evidence
    }


@pytest.mark.parametrize("name", ["captured.json", "step-000001.json", "witness-000003.json"])
def test_what_is_gone_of_it_is_named(pair: tuple[Path, Path], name: str) -> None:
    (pair[0] / "capture" / name).unlink()
    assert any(name in problem for problem in load(pair[0]).problems)
    assert compare(*pair, sources=None).outcome is Outcome.NOT_COMPARABLE


def test_every_verb_reads_it(root: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arm, control = map(str, pair)
    tensor = "blocks.0.attention.wq.weight"
    said = [["watch"], ["watch", "parity_pair"], ["show", arm], ["diff", arm, control], ["verdict", "parity_pair"]]
    said += [["compare", arm, control], ["report", "parity_pair"], ["bench", "parity_pair"], ["gc"]]
    said += [["compare", arm, control, "--zoom", tensor]]
    for words in said:
        code = main([*words, "--root", str(root)])
        printed = "".join(capsys.readouterr())
        assert code in CODES, (words, printed)
        assert "damaged" not in printed, (words, printed)
        assert "Traceback" not in printed, (words, printed)
