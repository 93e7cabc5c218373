"""Studies, wording and the close-up: what is asked, what a person reads and may type next."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main, read
from harness.config.catalog import ROOT
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.parity import Outcome, compare, so_far, study_text, text, verdict, zoom
from harness.parity.outcome import Finding, Grade, Stage, StudyVerdict
from harness.parity.telling import render
from harness.parity.telling.wording import OUTCOMES
from harness.store import provenance
from harness.store.errors import StoreError
from tests.parity.arms import Params, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, Case, duplicated, scaled
from tests.parity.edits import edit_json, edit_lines
from tests.parity.lab import CLEAN, as_study, write
from tests.parity.test_witness import CONTROL, SEEN
from tests.support.mutants import finds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a control, a clean arm of each, a broken arm and a repetition."""
    root = tmp_path_factory.mktemp("store")
    controls = [replace(FP32, seed=seed) for seed in (0, 1)]
    arms = [
        *(replace(OURS, seed=seed, strategy="optim_grads") for seed in (0, 1)),
        broken(replace(OURS, strategy="optim"), reduced=duplicated),
    ]
    runs = [write(root, arm) for arm in (*controls, replace(FP32, replicate=1), *arms)]
    as_study(root, dict(zip(runs, (None, None, None, runs[0], runs[1], runs[0]), strict=True)), "Is it the same?")
    write(root, replace(OURS, seed=7, strategy="optim"))  # of an earlier request: no arm of this one
    return root


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """It once more, to be changed."""
    path: Path = shutil.copytree(store, tmp_path / "copy")
    return path


def broken_arm(store: Path) -> Path:
    return next((store / "lab").glob("tiny-native-optim-fp32-*-steps12-[!s]*"))


def test_every_arm_meets_the_control_of_its_seeds(store: Path) -> None:
    found = verdict(store, "lab", sources=CLEAN)
    outcomes = sorted((Path(arm.arm).name.rpartition("-")[0], arm.outcome) for arm in found.arms)
    assert outcomes == [
        ("tiny-ddp-no_shard-fp32-fp32-dp2-k2-synthetic-lr0.003-steps12-r1", Outcome.EQUAL),
        ("tiny-native-optim-fp32-fp32-dp2-k2-synthetic-lr0.003-steps12", Outcome.DIFFERENT),
        ("tiny-native-optim_grads-fp32-fp32-dp2-k2-synthetic-lr0.003-steps12", Outcome.EQUIVALENT),
        ("tiny-native-optim_grads-fp32-fp32-dp2-k2-synthetic-lr0.003-steps12-s1", Outcome.EQUIVALENT),
    ]
    assert found.exit_code == 1
    shown = study_text(found)
    assert shown.startswith("DIFFERENT: study lab, 4 comparisons\nIs it the same?")
    assert "own gradient counted twice" in " ".join(shown.split())
    assert "next: python -m harness compare" in shown
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["outcome"] == "DIFFERENT"


def test_an_unfinished_arm_is_named_and_the_others_judged(copy: Path) -> None:
    victim = broken_arm(copy)
    edit_json(victim / "status.json", state="failed", reason="out of memory")
    found = verdict(copy, "lab", sources=CLEAN)
    assert found.exit_code == 4
    assert len(found.arms) == 4
    assert "it is failed, not done (out of memory)" in " ".join(study_text(found).split())


@pytest.mark.parametrize(
    ("cells", "says"),
    [([{"signature": "s", "directory": "d", "control": None}], "is empty"), ([], r"study\.json lists no cells")],
)
def test_a_record_of_nothing_to_judge_is_a_bad_request(copy: Path, cells: list[dict[str, object]], says: str) -> None:
    edit_json(copy / "lab" / "study.json", cells=cells)
    with pytest.raises(BadRequest, match=says):
        verdict(copy, "lab", sources=CLEAN)


def test_an_arm_whose_control_is_not_listed_is_told_of_the_record(copy: Path) -> None:
    record = copy / "lab" / "study.json"
    cells = [cell for cell in json.loads(record.read_text())["cells"] if cell["control"]]
    edit_json(record, cells=cells)
    with pytest.raises(StoreError, match=rf"study\.json compares .* with {cells[0]['control'][:8]}, which it does not"):
        so_far(copy, "lab", sources=CLEAN)
    with pytest.raises(BadRequest, match="valid: lab"):  # the damaged record hides no answer about another study
        verdict(copy, "typo")


test_a_record_that_nobody_checks_is_found = finds(
    "The terminal",
    test_an_arm_whose_control_is_not_listed_is_told_of_the_record="""
        unlisted control: An unlisted control ends a verdict with a KeyError
            store.study.read_study: cell["control"] not in listed => False
            ()
            KeyError
    """,
)


def test_a_study_asks_for_damaged_runs_alone(copy: Path) -> None:
    """Asking for the study leaves a run that is done as it is; the damaged one is named."""
    victim = broken_arm(copy)
    edit_lines(victim, lambda lines: lines.pop())
    last = study_text(verdict(copy, "lab", sources=CLEAN)).splitlines()[-1]
    assert victim.name in last
    assert last.endswith("launch.rerun=always")


def test_a_cell_that_was_never_started_is_named(copy: Path) -> None:
    gone = broken_arm(copy)
    shutil.rmtree(gone)
    with pytest.raises(BadRequest, match=f"1 of 6 cells was never started, or was removed: {gone.name}"):
        verdict(copy, "lab", sources=CLEAN)


def test_a_verdict_is_a_sentence_a_table_and_a_command(bench: Bench) -> None:
    case = next(case for case in FAULTS if case.name == "bucket dropped")
    shown = text(bench.judge(case))
    lines = shown.splitlines()
    sentence = " ".join(lines[: lines.index("")])
    assert sentence.startswith("DIFFERENT: lab/tiny-native-optim")
    assert "at step 1, " in sentence
    assert "first in blocks.0" in sentence
    assert any(line.startswith("T2    gradient distance") and line.endswith("BAD") for line in lines)
    assert lines[-2].startswith("next: python -m harness compare ")
    assert " --tensor blocks.0." in lines[-2]


def test_bits_that_are_not_owed_are_not_called_bad(bench: Bench) -> None:
    shown = text(bench.held(replace(OURS, strategy="optim_grads"), FP32))
    assert "BAD" not in shown
    assert "differ" in shown
    assert "numerics=fast promises no order of sums" in shown


def test_the_close_up_shows_where_it_is_wrong(bench: Bench) -> None:
    case = next(case for case in FAULTS if case.name == "tail of a shard lost")
    arm, control = bench.paths(case)
    shown = zoom(arm, control, "blocks.1.w_up.weight")
    _, _, start, _, stop, *_, mark = worst_of(shown).split()
    assert 1792 <= int(start) < int(stop) <= 2048
    assert mark == "BAD"


def worst_of(shown: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith("worst "))


def test_the_close_up_calls_nothing_bad_that_is_in_doubt(bench: Bench) -> None:
    """Of a tensor that jumped in a late step, which refutes nothing."""
    late = broken(replace(OURS, checked=True, captures=(1, 3)), local=_shrunk)
    arm, control = bench.run(late), bench.run(replace(FP32, checked=True, captures=(1, 3)))
    verdict = compare(arm, control, sources=CLEAN)
    assert verdict.outcome is Outcome.UNDECIDED, verdict.sentence
    assert worst_of(render.zoom(arm, control, "blocks.1.w_up.weight", step=3)).split()[-1] == "?"


def _shrunk(step: int, values: Params) -> Params:
    return {name: value * value.dtype.type(0.9 if step >= 3 else 1.0) for name, value in values.items()}


test_a_close_up_that_is_too_sure_is_noticed = finds(
    "The close-up of a tensor",
    test_the_close_up_calls_nothing_bad_that_is_in_doubt="""
        sure of a late step: What is in doubt is called bad
            parity.telling.render.zoom: step > 1 or envelope.flips => False
    """,
)


def test_the_close_up_names_what_there_is(bench: Bench) -> None:
    arm, control = bench.run(OURS), bench.run(FP32)
    with pytest.raises(BadRequest, match=r"embedding\.weight"):
        zoom(arm, control, "embedding")
    with pytest.raises(BadRequest, match="valid: 1"):
        zoom(arm, control, "embedding.weight", step=2)


DOUBTED = broken(replace(OURS, updates=()), reduced=scaled(0.98, "blocks"), reduced_from=8)
"""UNDECIDED at step 8 or later: nothing was captured there."""


def test_verdict_takes_runs_and_a_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control, *arms = (write(tmp_path, each) for each in (FP32, OURS, replace(OURS, strategy="optim_grads")))
    for run in (control, *arms):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    assert main(["verdict", str(arms[0]), "--control", str(control), str(arms[1]), str(control)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "EQUIVALENT: runs held against one control, 2 comparisons" in out, "the control itself is no arm"
    assert OUTCOMES[Outcome.EQUIVALENT] in out
    assert main(["verdict", str(control), "--control", str(control)]) == 2
    assert "no run to hold against it" in " ".join(capsys.readouterr().err.split())
    assert main(["verdict", "a", "b"]) == 2
    assert "verdict RUN ... --control RUN" in " ".join(capsys.readouterr().err.split())


def test_options_stand_anywhere() -> None:
    _, arguments = read(["compare", "train.steps=3", "--code", "OLD", "NEW", "--bitwise", "data.seq_len=8"])
    assert (arguments.code, arguments.bitwise) == (["OLD", "NEW"], True)
    assert arguments.words == ["train.steps=3", "data.seq_len=8"]
    _, arguments = read(["compare", "RUN", "--json", "OTHER", "--root", "x"])
    assert (arguments.words, arguments.json, arguments.root) == (["RUN", "OTHER"], True, "x")


def accepted(command: str) -> None:
    """What a shell makes of it is taken by the parser it is meant for."""
    words = shlex.split(command)
    if words[:2] == ["python", "run.py"]:
        rest = words[4:] if words[2] == "--from" else words[2:]
        assert words[2] != "--from" or Path(words[3]).is_dir()
        check_overrides([word for word in rest if word != "-m"], multirun="-m" in rest)
    else:
        assert words[:3] == ["python", "-m", "harness"], command
        read(words[3:])


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FAULTS[::4]])
def test_what_is_next_can_be_typed(bench: Bench, case: Case) -> None:
    for found in (bench.judge(case), bench.held(DOUBTED, FP32)):
        for command in re.findall(r"^next: (.*)", text(found), re.M):
            accepted(command)


SAMPLED, SCALE = "update by the rule, sampled", "gradient scale"


def row(check: str, ratio: float, grade: Grade = Grade.ok) -> Finding:
    return Finding("T2", check, Stage.optimizer, grade, ratio, 1.0, step=1)


def explained() -> set[str]:
    """Checks that the page of verdicts has a sentence of."""
    page = (ROOT / "docs/verdicts.md").read_text().partition("## Every check in a sentence\n")[2].partition("\n## ")[0]
    return {row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| ")} - {"check"}


def test_every_check_is_explained(bench: Bench) -> None:
    verdicts = [bench.judge(case) for case in FAULTS] + [bench.held(SEEN, CONTROL)]
    seen = {finding.check for verdict in verdicts for finding in (*verdict.evidence, *verdict.findings)}
    assert {check for check in seen if not check.endswith((" bits", " is finite"))} <= explained()
    sources = "".join(path.read_text() for path in (ROOT / "harness/parity").rglob("*.py"))
    assert {check for check in explained() if f'"{re.split(", | given", check)[0]}' not in sources} == set()


def test_the_table_is_of_checks_that_clean_pairs_pass() -> None:
    shares = render.shares()
    assert shares.keys() <= explained()
    assert all(0 <= share < 1 for share in shares.values())
    assert 0.4 < shares[SAMPLED] < 0.6, "it named itself in nearly every table"
    assert len(shares) > 25


def wrong_choices() -> Iterator[str]:
    """What is named of rows whose farthest is known."""
    shares = render.shares()
    unusual = row(SCALE, 2 * shares[SCALE])
    cases = {
        SCALE: [row(SAMPLED, shares[SAMPLED]), unusual],
        "gradient distance": [row("gradient distance", 1.2, Grade.doubt), row("weights between steps", 0.9)],
        "a check of its own": [row(SAMPLED, 0.2), row("a check of its own", 0.9)],
        "gradient norm": [row("gradient norm", 0.03), row("weights of forwards, sketched", 1e-6)],
    }
    for name, rows in cases.items():
        found = render.farthest(rows)
        if found is None or found[1].partition(",")[0] != name:
            yield f"{name}: {found}"
    found = render.farthest(cases[SCALE])
    if found != (unusual.ratio, f"{SCALE}, 200 % of the most in clean pairs"):
        yield f"told: {found}"


def test_what_is_far_for_this_pair_is_named() -> None:
    assert render.farthest([]) is None
    assert render.farthest([replace(row(SCALE, 0.1), observed="as kept", allowed="as kept")]) is None
    assert render.farthest([row("a check of its own", 0.9)]) == (0.9, "a check of its own")


def test_a_study_names_it(bench: Bench) -> None:
    verdict = bench.judge(next(case for case in FAULTS if case.name == "bucket dropped"))
    ratio, _ = render.used(verdict)
    assert ratio is not None
    assert ratio > 1, "a check that failed comes first"
    assert "of the most in clean pairs" in " ".join(study_text(StudyVerdict("lab", "", arms=(verdict,))).split())


test_a_mutant_is_found = finds(
    "What is far out",
    wrong_choices="""
        the tightest bound: All bounds are taken to be equally wide
            parity.telling.render.farthest: row.ratio / max(known.get(row.check, 1.0), LEAST) => row.ratio
        what passed before what failed: Failures are hidden
            parity.telling.render.farthest: grades.index(row.grade), => 0,
        any bit is far: A last bit of what is always equal is far
            parity.telling.render.LEAST: 1e-12
    """,
)
