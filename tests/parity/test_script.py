"""The minimal script beside a verdict finds the same wrong number from overrides alone, and none once it is gone."""

from __future__ import annotations

import ast
import json
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.main import main
from harness.config.catalog import ROOT
from harness.parity import Outcome, Verdict, compare
from harness.parity.telling import script as scripts
from harness.parity.telling.script import overrides, script, scripted
from harness.store.identity import signature
from harness.store.rundir import RunDir, flatten
from tests.parity import test_every_step
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, TWINS, Case, bf16, duplicated, stored_as
from tests.parity.edits import edit_config, edit_json
from tests.parity.lab import CLEAN
from tests.parity.test_every_step import AT
from tests.parity.test_witness import CONTROL, SEEN, twenty_one_bits
from tests.support.composing import compose
from tests.support.mutants import each
from tests.support.programs import run_program

Played = Callable[[str, Path, Path], tuple[int, str, list[list[str]]]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Played:
    """Carry out a script with a given arm and control in place of those it would make: exit code, what it printed, its
    commands."""

    def carried_out(text: str, arm: Path, control: Path) -> tuple[int, str, list[list[str]]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            commands.append(command)
            if command[1] == "-m":
                verdict = judged(*map(Path, command[4:6]))
                return SimpleNamespace(stdout=json.dumps(verdict.as_json()))
            root = Path(command[-1].removeprefix("launch.root="))
            if not root.exists():
                shutil.copytree({"arm": arm, "control": control}[root.name], root / "lab" / "run")
            return SimpleNamespace(returncode=75, stdout="")

        path = tmp_path / "script.py"
        path.write_text(text)
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(sys, "argv", [str(path)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(capsys.readouterr()), commands

    return carried_out


def judged(arm: Path, control: Path) -> Verdict:
    return compare(arm, control, sources=CLEAN)


def text_of(verdict: Verdict) -> str:
    found = script(verdict)
    assert found is not None
    return found


CASES = [
    *FAULTS[::3],
    *(
        Case(name, broken(test_every_step.SEEN, **hooks), test_every_step.CONTROL)
        for name, (hooks, *_) in test_every_step.FAULTS.items()
    ),
    Case("seen by itself", broken(SEEN, reduced=duplicated), CONTROL),
    Case("seen by the control itself", CONTROL, broken(SEEN, reduced=duplicated)),
    Case("in doubt", broken(SEEN, reduced=stored_as(twenty_one_bits)), CONTROL),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_script_finds_what_the_verdict_found(bench: Bench, play: Played, case: Case) -> None:
    arm, control = bench.paths(case)
    verdict = bench.judge(case)
    finding, text = scripts.first_shown(verdict), text_of(verdict)
    assert finding is not None
    assert max(map(len, text.splitlines())) <= 120
    told = " ".join(str(ast.get_docstring(ast.parse(text))).split())
    assert " ".join(verdict.sentence.replace('"', "'").split()) in told
    code, said, _ = play(text, arm, control)
    assert code == 1, said
    assert f"{finding.check}, step {finding.step}, " in said
    right = arm if case.arm is CONTROL else control
    code, said, _ = play(text, right, right)
    assert code == 0, said


# -- what a script must not say ----------------------------------------------------------------------------------------


def wrong_answers(bench: Bench, play: Played, change: Callable[[str], str]) -> Iterator[str]:
    """Pairs of which a script, changed, says something wrong."""
    wrong, control = late(AT), test_every_step.CONTROL
    text = change(text_of(judged(bench.run(wrong), bench.run(control))))
    pairs = {
        "as it was": (wrong, control, 1),
        "mended": (test_every_step.SEEN, control, 0),
        "later": (late(AT + 2), control, 0),
        "another fault": (broken(test_every_step.SEEN, moments=test_every_step.in_bf16), control, 0),
        "not comparable": (wrong, replace(control, seed=1), 125),
    }
    for name, (arm, other, wanted) in pairs.items():
        code, said, _ = play(text, bench.run(arm), bench.run(other))
        if code != wanted:
            yield f"{name}: {said}"


def late(step: int) -> Arm:
    return broken(test_every_step.SEEN, reduced=stored_as(bf16), reduced_from=step)


def test_a_script_asks_for_its_check_at_its_step(bench: Bench, play: Played) -> None:
    assert list(wrong_answers(bench, play, lambda text: text)) == []


WRONG_SCRIPTS = {
    "any step": (' and (each["step"] or 0) <= STEP', "", "A fault that begins later is taken for it"),
    "any check": ('each["check"] == CHECK and ', "", "Another fault is taken for it"),
    "refused is right": ('if verdict["outcome"] == "NOT_COMPARABLE":', "if False:", "A pair that differs passes"),
    "bad alone is right": ("return int(bool(failed))", "return int(not failed)", "The answer is turned round"),
}


@pytest.mark.parametrize("name", each("The script of a finding", ((n, row[2]) for n, row in WRONG_SCRIPTS.items())))
def test_a_wrong_script_is_noticed(bench: Bench, play: Played, name: str) -> None:
    right, wrong, _ = WRONG_SCRIPTS[name]
    assert right in scripts.TEMPLATE.read_text()
    assert list(wrong_answers(bench, play, lambda text: text.replace(right, wrong)))


def test_nothing_is_written_for_what_passes_or_cannot_be_compared(bench: Bench, tmp_path: Path) -> None:
    verdicts = [bench.judge(case) for case in TWINS[:4]]
    verdicts.append(judged(bench.run(replace(OURS, replicate=1)), bench.run(OURS)))
    verdicts.append(judged(bench.run(replace(OURS, seed=1)), bench.run(OURS)))
    bare = (replace(OURS, strategy="optim_grads", captures=()), replace(FP32, captures=()))
    verdicts.append(judged(*map(bench.run, bare)))  # only evidence is missing
    outcomes = {verdict.outcome for verdict in verdicts}
    assert outcomes == {Outcome.EQUIVALENT, Outcome.EQUAL, Outcome.NOT_COMPARABLE, Outcome.UNDECIDED}
    assert [scripted(verdict) for verdict in verdicts] == verdicts
    assert not list(bench.root.rglob("verdict"))


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "lab" / run.name)
    return tmp_path / "lab" / run.name


def test_a_resumed_run_is_interrupted_where_it_was(bench: Bench, play: Played, tmp_path: Path) -> None:
    run, control = copied(bench.run(SEEN), tmp_path), bench.run(CONTROL)
    edit_json(run / "summary.json", restored={"step": 4, "wrong": ["head.output.weight"]})
    text = text_of(judged(run, control))
    code, said, commands = play(text, run, control)
    assert (code, "head.output.weight" in said, len(commands)) == (1, True, 4)
    assert commands[0] == commands[1]
    assert {"ckpt.policy=last", "launch.preempt_at=4"} <= set(commands[0])
    edit_json(run / "summary.json", restored={"step": 4, "wrong": []})
    assert play(text, run, control)[0] == 0


def test_runs_record_what_those_of_the_verdict_did_and_check_every_step(bench: Bench, tmp_path: Path) -> None:
    run = copied(bench.run(broken(OURS, reduced=duplicated)), tmp_path)
    edit_config(run, "measure", capture_limit_mib=7)
    arm, control = (set(scripts.again(RunDir(each))) for each in (run, bench.run(FP32)))
    assert {"measure.capture_steps=[1]", "measure.step_checks_share=1.0", "ckpt.policy=none"} <= arm & control
    assert "measure.capture_limit_mib=7" in arm - control
    assert "engine.name=ddp" in control - arm
    edit_config(run, "measure", step_checks=False)
    assert not any("share" in word for word in scripts.again(RunDir(run)))


def test_two_runs_of_one_configuration_have_no_script(bench: Bench, play: Played) -> None:
    """Overrides do not make a difference that is not in settings (other code?); but what a run shows by itself."""
    wrong, run = bench.run(broken(OURS, reduced=duplicated)), bench.run(OURS)
    verdict = judged(wrong, run)
    assert verdict.outcome is Outcome.DIFFERENT
    assert script(verdict) is None
    alone = bench.run(broken(SEEN, reduced=duplicated))
    assert play(text_of(judged(alone, bench.run(SEEN))), alone, alone)[0] == 1


@pytest.mark.parametrize(
    "words",
    [
        ("model=moe", "optimizer=sgd", "optimizer.clip_norm=null", "train.replicate=2"),
        ("data=text", "data.path='/a b/ü,c=d'", "numerics=ordered", "engine.transport=backend"),
        (
            *("fault.name=tests.faults.update:F20_norm_counts_replicas", "sharding=no_shard"),
            *("optimizer.betas=[0.8,0.99]", "cluster.threads_per_rank=2"),
        ),
        ("measure.capture_steps=[1,3]", "measure=bench", "train.steps=9", "ckpt=none"),
    ],
)
def test_overrides_make_the_same_run(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.config.rules.check", lambda *_: [])  # whether there is such a file does not matter
    config = compose(words).config
    found = overrides(flatten(config))
    again = compose([*found, *(word for word in words if word.startswith("ckpt"))]).config
    assert signature(again) == signature(config)
    assert again["cluster"]["threads_per_rank"] == config["cluster"]["threads_per_rank"]
    assert len(found) < 16


def test_a_store_that_takes_no_script_has_its_verdict(bench: Bench, tmp_path: Path) -> None:
    arm = copied(bench.run(broken(OURS, reduced=duplicated)), tmp_path)
    (arm / "verdict").touch()  # in the way, as a read-only file system is
    verdict = judged(arm, bench.run(FP32))
    assert scripted(verdict) == verdict
    (arm / "verdict").unlink()
    written = scripted(verdict).script
    assert (arm / "verdict" / f"{bench.run(FP32).name}.py").is_file()
    assert written.startswith("python ")


@pytest.mark.parametrize("mended", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_really_finds_a_fault_of_the_engine_and_passes_without(
    mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ["sharding=optim", "train.global_batch_size=8", "train.microbatch_size=2", "train.steps=3"]
    cell += ["data.seq_len=16", "model.num_layers=1", "ckpt=none", f"launch.root={tmp_path}", "study.name=s"]
    monkeypatch.chdir(ROOT)
    done = run_program(["run.py", *cell, "-m", "fault=scale_by_two,none"])
    assert done.returncode == 0, done.stdout + done.stderr
    control, arm = sorted((tmp_path / "s").glob("tiny*"), key=lambda path: "scale" in path.name)
    assert main(["compare", str(arm), str(control)]) == 1
    path = arm / "verdict" / f"{control.name}.py"
    assert f"next: python {shlex.quote(str(path))}\n" in capsys.readouterr().out
    shutil.rmtree(control)  # the script needs neither run
    text = path.read_text()
    if mended:
        path.write_text(text.replace("'fault.name=scale_by_two'", "'fault.name=none'"))
    again = subprocess.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True)
    assert again.returncode == int(not mended), again.stdout + again.stderr
    assert again.stdout.startswith("EQUAL" if mended else "DIFFERENT")
    (made,) = tmp_path.glob("again-*/arm/*/*/config.yaml")
    assert RunDir(made.parent).config()["train"]["steps"] == 3
