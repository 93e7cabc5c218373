"""A run's golden file: small, read as a control, refused where it was touched; faults are found against it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from harness.cli.main import main
from harness.parity import Outcome, Verdict, baseline
from harness.parity.gate import gate, made
from harness.parity.record import load
from harness.parity.telling.render import junit, markdown
from harness.parity.tiers import numeric
from tests.parity.arms import broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, TWINS, Case, scaled
from tests.parity.edits import edit_json
from tests.support.mutants import finds

CONTROL = replace(FP32, checked=True, steps=12)
ARM = replace(OURS, checked=True, strategy="optim_grads", steps=12)


@pytest.fixture
def golden(bench: Bench, tmp_path: Path) -> Path:
    path = tmp_path / "golden.npz"
    path.write_bytes(made(bench.run(CONTROL)))
    return path


def judged(bench: Bench, golden: Path, arm: Any) -> Verdict:
    return gate(bench.run(arm), golden)


def test_a_baseline_is_the_run_but_for_whole_tensors(bench: Bench, golden: Path) -> None:
    run, held = load(bench.run(CONTROL)), load(golden)
    assert golden.stat().st_size < baseline.LIMIT_BYTES
    assert held.problems == ()
    assert dict(held.columns) == dict(run.columns)
    assert held.stream is not None
    assert run.stream is not None
    assert held.stream.tensors == run.stream.tensors
    assert held.stream.steps.tobytes() == run.stream.steps.tobytes()
    assert held.captures == {}
    assert {"hosts", "submit_host", "git"}.isdisjoint(held.provenance)


def test_the_run_itself_is_equal_and_another_layout_equivalent(bench: Bench, golden: Path) -> None:
    assert judged(bench, golden, CONTROL).outcome is Outcome.EQUAL
    found = judged(bench, golden, ARM)
    assert found.outcome is Outcome.EQUIVALENT, found.sentence
    assert bench.held(ARM, golden).outcome is Outcome.EQUIVALENT


CORPUS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.full] if place % 4 else [])
    for place, case in enumerate((*FAULTS, *TWINS))
]


@pytest.mark.parametrize("case", CORPUS)
def test_the_corpus_is_judged_as_against_the_run(case: Case, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "golden.npz").write_bytes(made(bench.run(replace(case.control, checked=True))))
    found = gate(bench.run(replace(case.arm, checked=True)), tmp_path / "golden.npz")
    assert found.exit_code == (1 if case in FAULTS else 0), found.sentence


def test_another_configuration_is_not_comparable(bench: Bench, golden: Path) -> None:
    found = judged(bench, golden, replace(ARM, lr=ARM.lr / 2))
    assert found.outcome is Outcome.NOT_COMPARABLE
    assert "optimizer.lr" in found.sentence
    (shown,) = found.commands  # `diff` and `--from` take no file
    assert shown.split()[-2] == "show"


def test_sources_may_be_others_but_bits_are_owed_on_demand(bench: Bench, golden: Path, tmp_path: Path) -> None:
    run = bench.copy(replace(CONTROL, ranks=4, k=1), tmp_path)
    edit_json(run / "provenance.json", sources_digest="of another version")
    assert gate(run, golden).outcome is Outcome.EQUIVALENT
    assert "two versions of the code" in gate(run, golden).admissible
    assert "--bitwise" in gate(run, golden, bitwise=True).admissible


def test_a_long_run_keeps_its_first_and_last_steps(bench: Bench) -> None:
    run = load(bench.run(replace(CONTROL, steps=40)))
    assert run.stream is not None
    few = np.load(io.BytesIO(baseline._packed({}, run.stream, 10)))["kept"].tolist()
    assert few[:5] == [1, 2, 3, 4, 5]
    assert few[-1] == 40
    assert len(few) <= 10


def test_what_does_not_fit_or_did_not_end_makes_no_baseline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = bench.copy(CONTROL, tmp_path)
    words = ["baseline", str(run), "--out", str(tmp_path / "no.json")]
    with monkeypatch.context() as patch:
        patch.setattr(baseline, "LIMIT_BYTES", 1000)
        assert main(words) == 2
    assert "fewer steps" in capsys.readouterr().err
    edit_json(run / "status.json", state="failed")
    assert main(words) == 2
    assert "it is failed" in capsys.readouterr().err
    assert not (tmp_path / "no.json").exists()


Damage = Callable[[Path], None]


def edited(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another file of the same form."""
    with np.load(path) as held:
        arrays = dict(held)
    facts = json.loads(arrays["facts"].tobytes())
    change(facts)
    np.savez_compressed(path, **{**arrays, "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)})


DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (lambda path: path.unlink(), "is not a run"),
    "a folder": (lambda path: (path.unlink(), path.mkdir())[0], "is not a run"),
    "of before": (lambda path: path.write_text('{"version": 1}') and None, "or is of an older version: make it anew"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]) and None, "was cut"),
    "edited": (edited, "is damaged"),
    "another archive": (lambda path: np.savez(path, a=np.ones(2)), "is damaged"),
    "another version": (lambda path: changed(path, lambda facts: facts.update(version=3)), "another version"),
    "no forward": (lambda path: changed(path, lambda facts: facts.pop("forward")), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_no_baseline_is_refused_in_a_sentence(
    name: str, bench: Bench, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, says = DAMAGES[name]
    damage(golden)
    assert main(["gate", str(golden), str(bench.run(CONTROL))]) == 2
    told = capsys.readouterr().err
    assert says in " ".join(told.split())
    assert "Traceback" not in told


def test_the_verb_writes_xml_and_markdown_of_the_verdict(
    bench: Bench, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bench.run(broken(ARM, reduced=scaled(1.02)))
    files = [tmp_path / "of" / "gate.xml", tmp_path / "of" / "gate.md"]
    assert main(["gate", str(golden), str(bad), "--junit", str(files[0]), "--markdown", str(files[1])]) == 1
    suite = ElementTree.parse(files[0]).getroot()
    failed = [case.get("name", "") for case in suite if len(case)]
    assert int(suite.get("failures", 0)) == len(failed) > 1
    assert int(suite.get("tests", 0)) == len(suite)
    assert any("length of a gradient (step 1) " in name for name in failed)
    page = files[1].read_text()
    assert page.startswith("## DIFFERENT\n\n```\n")
    assert re.search(r"^T2  ", page, re.M)
    assert main(["gate", str(golden), str(bench.run(ARM)), "--junit", str(files[0]), "--json"]) == 0
    assert all(not len(case) for case in ElementTree.parse(files[0]).getroot())
    capsys.readouterr()


def test_what_markdown_would_take_for_its_own_is_shown_verbatim(bench: Bench, golden: Path) -> None:
    found = replace(judged(bench, golden, ARM), sentence="a ``` <d>")
    assert markdown(found, "x|y").count("\n````\n") == 2
    assert (
        "<d>" in ElementTree.fromstring(junit(replace(found, outcome=Outcome.UNDECIDED), "x"))[0][0].attrib["message"]
    )


def test_a_refresh_says_what_changes_and_by_how_much_of_the_bound(
    bench: Bench, golden: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = bench.run(ARM)
    assert main(["baseline", str(run), "--refresh", str(golden)]) == 0
    told = capsys.readouterr().out
    assert "EQUIVALENT" in told
    for word in ("of the bound", "gradient distance, sketched (step 1", "%", "engine.name", "last grad_norm"):
        assert word in told
    assert judged(bench, golden, ARM).outcome is Outcome.EQUAL
    assert main(["baseline", str(run), "--out", str(golden)]) == 2
    assert "--refresh" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "check"), [(1.02, numeric.LENGTH), (-1.0, numeric.DISTANCE)])
def test_a_wrong_factor_or_sign_is_found(bench: Bench, golden: Path, factor: float, check: str) -> None:
    wrong = judged(bench, golden, broken(ARM, reduced=scaled(factor)))
    assert check in {found.check for found in wrong.findings}


test_a_mutant_is_found = finds(
    "Baselines",
    test_a_wrong_factor_or_sign_is_found="""
        lengths: Norms are not compared
            parity.tiers.numeric.first_step_sketched: abs(left - right) / right => 0.0 * right
            (factor=1.02, check=numeric.LENGTH)
        distances: Sketches are not compared
            parity.tiers.numeric.first_step_sketched: (0, DISTANCE, distance, => (0, DISTANCE, 0.0 * distance,
            (factor=-1.0, check=numeric.DISTANCE)
    """,
    test_the_run_itself_is_equal_and_another_layout_equivalent="""
        the draw: Four sketches tell a distance exactly
            parity.tiers.numeric.first_step_sketched: DRAW * bound => 1e-3 * bound
        the rows: The rows of two tensors change places
            parity.baseline.read: np.ascontiguousarray(whole[1]) => whole[1][:, ::-1]
            ()
            ^(AssertionError|ValueError)
    """,
    test_a_file_that_is_no_baseline_is_refused_in_a_sentence="""
        the version: A file of another format is believed
            parity.baseline.read: found.pop("version") != VERSION => not found.pop("version")
            (name="another version")
    """,
)
