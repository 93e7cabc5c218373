"""How verdicts are asked for and told: any runs against one, options anywhere, what to type next."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main, read
from harness.config.overrides import check_overrides
from harness.parity import Outcome, Verdict, text
from harness.parity.telling.wording import OUTCOMES
from harness.store import provenance
from tests.parity.arms import broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, Case, scaled
from tests.parity.edits import edit_json
from tests.parity.lab import write

DOUBTED = broken(replace(OURS, updates=()), reduced=scaled(0.98, "blocks"), reduced_from=8)
"""UNDECIDED at step 8 or later: nothing was captured there."""


def doubted(bench: Bench) -> Verdict:
    return bench.held(DOUBTED, FP32)


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
    for verdict in (bench.judge(case), doubted(bench)):
        for command in re.findall(r"^next: (.*)", text(verdict), re.M):
            accepted(command)
