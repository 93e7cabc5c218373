"""The minimal script beside a verdict finds the same wrong number from overrides alone, and none once it is gone."""

from __future__ import annotations

import ast
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from harness.cli.main import main
from harness.config.catalog import ROOT
from harness.parity import Outcome, Verdict, compare
from harness.parity.outcome import IN_16_BITS, Finding, Grade, Stage
from harness.parity.telling import script as scripts
from harness.parity.telling.script import LOOKS, first_shown, overrides, script, scripted, write_script
from harness.store import check_stream
from harness.store.identity import signature
from harness.store.rundir import RunDir, flatten
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, TWINS, UNSHOWN, Case, duplicated, stored_as
from tests.parity.edits import edit_config, edit_json, edit_lines
from tests.parity.lab import CLEAN, in_one_file_a_step
from tests.parity.test_witness import CONTROL, SEEN, twenty_one_bits
from tests.support.composing import compose
from tests.support.mutants import each
from tests.support.programs import run_program

Played = Callable[[str, Mapping[str, Path]], tuple[int, str, list[list[str]]]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Played:
    """Carry out a script with given runs in place of those it would make: exit code, what it printed, its commands."""

    def carried_out(text: str, runs: Mapping[str, Path]) -> tuple[int, str, list[list[str]]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            commands.append(command)
            root = Path(command[-1].removeprefix("launch.root="))
            if not root.exists():
                shutil.copytree(runs[root.name], root / "lab" / "run")
                in_one_file_a_step(root / "lab" / "run" / "capture")
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


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FAULTS])
def test_a_script_finds_what_the_verdict_found(bench: Bench, play: Played, case: Case) -> None:
    arm, control = bench.paths(case)
    verdict = bench.judge(case)
    finding, text = first_shown(verdict), text_of(verdict)
    assert finding is not None
    assert len(text.splitlines()) <= 110
    assert max(map(len, text.splitlines())) <= 120
    told = " ".join(str(ast.get_docstring(ast.parse(text))).split())
    assert " ".join(verdict.sentence.replace('"', "'").split()) in told
    code, said, _ = play(text, {"arm": arm, "control": control})
    assert code == 1, said
    if isinstance(finding.observed, float) and finding.tensor:
        measured = float(said.rpartition(f"{finding.check}: ")[2].partition(",")[0])
        assert measured == pytest.approx(finding.observed, rel=1e-3)
    code, said, _ = play(text, {"arm": control, "control": control})
    assert code == 0, said


def test_every_check_is_shown_or_known_to_show_nothing(bench: Bench) -> None:
    """A check that is added must be given a look, or be said to have none."""
    seen: set[str] = set()
    for verdict in [bench.judge(case) for case in FAULTS] + [judged(bench.run(SEEN), bench.run(CONTROL))]:
        seen |= {finding.check for finding in (*verdict.evidence, *verdict.findings)}
    assert seen <= {*LOOKS, *UNSHOWN}
    assert not {*LOOKS} & {*UNSHOWN}
    spoken = {check for check in LOOKS if not check.endswith((" bits", " is finite"))}
    page = (ROOT / "docs/verdicts.md").read_text().partition("## Every check in a sentence\n")[2].partition("\n## ")[0]
    explained = {row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| ")}
    assert explained - {"check"} == spoken | {*UNSHOWN}, "each is explained, and is shown or known not to be"


# -- every kind of finding ---------------------------------------------------------------------------------------------

EVERY = {"captures": (1, 2, 3), "updates": (1, 2, 3), "witnessed": True, "checked": True}
WHOLE, BARE = replace(OURS, **EVERY), replace(FP32, **EVERY)
AT, TENSOR = 2, "blocks.1.w_up.weight"
Spoil = Callable[[Path], None]


def in_capture(kind: str, change: Callable[[dict[str, Any]], object], step: int = AT) -> Spoil:
    """Change the tensors of a capture."""

    def spoil(run: Path) -> None:
        path = run / "capture" / f"{kind}-{step:06d}.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return spoil


def in_line(**changes: Any) -> Spoil:
    """Change a step's line of the record."""
    return lambda run: edit_lines(run, lambda lines: lines[AT - 1].update(changes))


def in_later_lines(key: str) -> Spoil:
    return lambda run: edit_lines(run, lambda lines: [line.update({key: 2 * line[key]}) for line in lines[6:]])


def in_stream(column: str, row: int = AT - 1, value: float = 0.00479) -> Spoil:
    """Change a number of the stream, to a fault of half a per cent if nothing else is said."""

    def spoil(run: Path) -> None:
        stream = check_stream.read(run)
        assert stream is not None
        steps = stream.steps.copy()
        steps[row, check_stream.step_columns(stream.sketches).index(column)] = value
        (run / "step_checks" / "steps.f64").write_bytes(steps.tobytes())

    return spoil


def in_facts(file: str, **facts: Any) -> Spoil:
    return lambda run: edit_json(run / file, **facts)


TWICE = {kind: in_capture(kind, lambda held: held[TENSOR].mul_(2)) for kind in ("step", "update", "witness")}
LONGER = in_capture("step", lambda held: [each.mul_(1.01) for each in held.values()])
OF_WITNESS = f"capture/witness-{AT:06d}.json"
STRUCTURE = {"aliases": [], "untied": [], "elsewhere": []}
SAME = {TENSOR: 7, "blocks.0.w_up.weight": 7, "head.output.weight": 8}

SPOILS: dict[str, Spoil] = {
    "tokens as fed": in_line(fed_digest="0"),
    **dict.fromkeys(("gradient distance", "gradient, worst piece", "gradient among its fellows"), TWICE["step"]),
    "gradient scale": TWICE["step"],
    "scale of all gradients": LONGER,
    "tensor exists": in_capture("step", lambda held: held.pop(TENSOR)),
    "gradient bits": in_capture("step", lambda held: held[TENSOR].view(-1)[3:4].mul_(1.01)),
    "gradient is finite": in_capture("step", lambda held: held[TENSOR].view(-1)[3:4].fill_(float("nan"))),
    "update size": TWICE["update"],
    "update by the rule": TWICE["update"],
    "update by the rule, worst piece": in_capture("update", lambda held: held[TENSOR].view(-1)[:200].zero_()),
    "update without a gradient": TWICE["update"],
    IN_16_BITS: in_capture("update", lambda held: held[TENSOR].view(-1)[:200].mul_(2), 1),
    "sum of local gradients": TWICE["step"],
    "sum, worst piece": in_capture("step", lambda held: held[TENSOR].view(-1)[:200].zero_()),
    "scale of the sum": TWICE["witness"],
    "witnessed tensor": in_capture("step", lambda held: held.pop(TENSOR)),
    "weights of the forward": in_facts(OF_WITNESS, wrong_weights=[{"rank": 1, "tensor": TENSOR, "what": "another"}]),
    "weights apart": in_facts(OF_WITNESS, kept=SAME),
    "replicas": in_facts("summary.json", other_replicas=[1]),
    "tensors apart": in_facts("summary.json", structure={**STRUCTURE, "elsewhere": ["rank 1"]}),
    "ties kept": in_facts("summary.json", structure={**STRUCTURE, "untied": [TENSOR]}),
    "state as saved": in_facts("summary.json", restored={"step": 1, "wrong": [TENSOR]}),
    "final weights": in_facts("summary.json", final_weights="0"),
    "logged norm": in_line(grad_norm=3.0),
    **{check: in_stream(column, 12 if after else AT - 1) for check, column, after in scripts.STREAMED},
    "update by the rule, sampled": in_stream("rule", value=2.0),
    "local gradient given the weights": TWICE["witness"],
    "gradient given the weights": TWICE["step"],
    "weights given those before": TWICE["update"],
    "weights after equal gradients": TWICE["update"],
    **dict.fromkeys(("loss given the weights", "loss", "loss bits"), in_line(loss=9.0)),
    **dict.fromkeys(("gradient norm", "grad_norm bits"), in_line(grad_norm=9.0)),
    **dict.fromkeys(("weight norm", "param_norm bits"), in_line(param_norm=9.0)),
    "loss, mean of the later half": in_later_lines("loss"),
    "gradient norm, mean of the later half": in_later_lines("grad_norm"),
    **{f"{key} is finite": in_line(**{key: "nan"}) for key in ("loss", "grad_norm", "param_norm")},
}
"""What makes a run wrong as each check finds it."""


def whole(run: Path) -> Path:
    """What a run without a fault has in its files beside what the simulated one records."""
    edit_json(run / "summary.json", other_replicas=[], structure=STRUCTURE, restored={"step": 1, "wrong": []})
    edit_json(run / OF_WITNESS, kept={name: place for place, name in enumerate(SAME)})
    edit_lines(run, lambda lines: [line.update(param_norm=5.0) for line in lines])
    for column in check_stream.ONCE:
        in_stream(column, value=1e-9)(run)
    return run


def still(run: Path) -> Path:
    """Of a tensor that no gradient reached."""
    in_capture("update", lambda held: held[TENSOR].zero_())(run)
    return run


def arm_of(arm: Arm, check: str) -> Arm:
    return replace(arm, compute="bf16", main="bf16") if check == IN_16_BITS else arm


def said_of(bench: Bench, check: str) -> str:
    """The script of a verdict that ends with this finding alone."""
    look = LOOKS[check]
    paths = bench.run(arm_of(WHOLE, check)), bench.run(arm_of(BARE, check))
    bound = "as it should be" if look.body in ("facts", "fed") or look.measure in EXACTLY else 4e-4
    bound = 1.0 if look.key == "rule" else bound  # its unit is what rounding explains
    step = 12 if look.whole and look.body != "facts" else 1 if check == IN_16_BITS else AT
    tensor = None if check == "scale of all gradients" else TENSOR
    note = f"in {Path(paths[0]).name}"
    finding = Finding("T2", check, Stage.gradient, Grade.bad, 1.0, bound, step=step, tensor=tensor, note=note)
    return text_of(replace(judged(*paths), outcome=Outcome.DIFFERENT, findings=(finding,)))


EXACTLY = [scripts.MEASURES[name] for name in ("bits", "finite", "exists")]
EXACTLY += [scripts.OF_SERIES[name] for name in ("bits", "finite")]


@pytest.mark.parametrize("check", LOOKS)
def test_the_script_of_every_kind_tells_a_bad_run_from_a_clean_one(
    bench: Bench, play: Played, tmp_path: Path, check: str
) -> None:
    text = said_of(bench, check)
    clean, bad = (whole(copied(bench.run(arm_of(BARE, check)), tmp_path / each)) for each in ("clean", "bad"))
    if check == "update without a gradient":
        still(clean)
    SPOILS[check](bad)
    for run, wanted in ((bad, 1), (clean, 0)):
        code, said, _ = play(text, {"arm": run, "control": clean})
        assert code == wanted, said
        assert ("BEYOND" in said) is bool(wanted)


OLD = (
    'names = [n for c in ("sum", "gather", "kept", "replicas", "rule", "again") for n in (c, c + "_tensor")] + ["norm"]'
)
WRONG_SCRIPTS = {
    "columns of its own": ("the same function", 'names, tensors = facts["columns"]', f"{OLD}; tensors"),
    "the row before": ("sum, sketched", "[ROW * len(names) : (ROW + 1)", "[(ROW - 1) * len(names) : ROW"),
    "any checksum at all": ("weights apart", ".count(found[0][TENSOR]) > 1", ".count(found[0][TENSOR]) > 0"),
    "rank 0's memory alone": ("tensors apart", ' + found[0]["elsewhere"]', ""),
}


@pytest.mark.parametrize(
    "name",
    each("The script of a finding", ((name, f"{check}: {name}") for name, (check, _, _) in WRONG_SCRIPTS.items())),
)
def test_a_wrong_script_is_noticed(bench: Bench, play: Played, tmp_path: Path, name: str) -> None:
    check, right, wrong = WRONG_SCRIPTS[name]
    text = said_of(bench, check)
    assert right in text

    def mutated(_: str, runs: Mapping[str, Path]) -> tuple[int, str, list[list[str]]]:
        return play(text.replace(right, wrong), runs)

    with pytest.raises(AssertionError):
        test_the_script_of_every_kind_tells_a_bad_run_from_a_clean_one(bench, mutated, tmp_path, check)


def test_nothing_is_written_for_what_passes_or_cannot_be_compared(bench: Bench, tmp_path: Path) -> None:
    verdicts = [bench.judge(case) for case in TWINS[:4]]
    verdicts.append(judged(bench.run(replace(OURS, replicate=1)), bench.run(OURS)))
    verdicts.append(judged(bench.run(replace(OURS, seed=1)), bench.run(OURS)))
    outcomes = {verdict.outcome for verdict in verdicts}
    assert outcomes == {Outcome.EQUIVALENT, Outcome.EQUAL, Outcome.NOT_COMPARABLE}
    assert [write_script(verdict) for verdict in verdicts] == [None] * len(verdicts)
    assert not list(bench.root.rglob("verdict"))


def test_where_only_evidence_is_missing_there_is_nothing_to_show(bench: Bench) -> None:
    verdict = judged(
        bench.run(replace(OURS, strategy="optim_grads", captures=())), bench.run(replace(FP32, captures=()))
    )
    assert verdict.outcome is Outcome.UNDECIDED
    assert script(verdict) is None


def test_a_doubt_has_a_script(bench: Bench, play: Played) -> None:
    arm = bench.run(broken(SEEN, reduced=stored_as(twenty_one_bits)))
    verdict = judged(arm, bench.run(CONTROL))
    assert verdict.outcome is Outcome.UNDECIDED
    assert play(text_of(verdict), {"arm": arm})[0] == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_what_a_run_says_of_itself_needs_that_run_alone(bench: Bench, play: Played, swapped: bool) -> None:
    pair = [bench.run(broken(SEEN, reduced=duplicated)), bench.run(CONTROL)]
    verdict = judged(*(pair[::-1] if swapped else pair))
    code, said, commands = play(text_of(verdict), {"control" if swapped else "arm": pair[0]})
    assert code == 1
    assert len(commands) == 1
    assert "step and " in said
    assert "witness: [" in said


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "lab" / run.name)
    return tmp_path / "lab" / run.name


def test_wrong_weights_are_listed(bench: Bench, play: Played, tmp_path: Path) -> None:
    run = copied(bench.run(SEEN), tmp_path)
    wrong = {"rank": 1, "tensor": "head.output.weight", "what": "computed with other weights than the main ones"}
    edit_json(run / "capture" / "witness-000001.json", wrong_weights=[wrong])
    text = text_of(judged(run, bench.run(CONTROL)))
    code, said, _ = play(text, {"arm": run})
    assert (code, "head.output.weight" in said) == (1, True)
    assert play(text, {"arm": bench.run(SEEN)})[0] == 0


def test_a_resumed_run_is_interrupted_where_it_was(bench: Bench, play: Played, tmp_path: Path) -> None:
    run, baseline = copied(bench.run(SEEN), tmp_path), bench.run(SEEN)
    edit_json(run / "summary.json", restored={"step": 4, "wrong": ["head.output.weight"]})
    text = text_of(judged(run, bench.run(CONTROL)))
    code, said, commands = play(text, {"arm": run})
    assert (code, "head.output.weight" in said, len(commands)) == (1, True, 2)
    assert commands[0] == commands[1]
    assert {"ckpt.policy=last", "launch.preempt_at=4", "train.steps=12"} <= set(commands[0])
    shutil.copytree(baseline, tmp_path / "baseline")
    edit_json(tmp_path / "baseline" / "summary.json", restored={"step": 4, "wrong": []})
    assert play(text, {"arm": tmp_path / "baseline"})[0] == 0


def commands_of(bench: Bench, play: Played, arm: Arm, control: Arm = FP32) -> dict[str, set[str]]:
    paths = {"arm": bench.run(arm), "control": bench.run(control)}
    commands = play(text_of(judged(*paths.values())), paths)[2]
    return {Path(command[-1]).name: set(command) for command in commands}


def test_runs_are_cut_without_another_learning_rate(bench: Bench, play: Played) -> None:
    late = broken(OURS, reduced=duplicated, reduced_from=3)
    words = commands_of(bench, play, late)["arm"]
    assert {"train.steps=12", "launch.preempt_at=3", "ckpt.policy=none"} <= words  # steps fix the schedule
    first = commands_of(bench, play, broken(OURS, reduced=duplicated))
    assert {"launch.preempt_at=2", "measure.capture_steps=[1,2]"} <= first["arm"] & first["control"]
    assert "engine.name=ddp" in first["control"] - first["arm"]


@pytest.mark.parametrize(("captures", "kept"), [((1,), True), ((), False)])
def test_the_limit_of_captures_is_kept_where_something_is_captured(
    bench: Bench, tmp_path: Path, captures: tuple[int, ...], kept: bool
) -> None:
    """Where nothing is, `run.py` would refuse the setting as one without effect."""
    arm = broken(replace(OURS, captures=captures, updates=()), reduced=duplicated)
    run = copied(bench.run(arm), tmp_path)
    edit_config(run, "measure", capture_limit_mib=7)
    verdict = judged(run, bench.run(replace(FP32, captures=captures, updates=())))
    assert verdict.outcome is Outcome.DIFFERENT
    assert ("measure.capture_limit_mib=7" in text_of(verdict)) is kept


def test_a_script_that_cannot_run_says_nothing_about_the_fault(bench: Bench, tmp_path: Path) -> None:
    """125: git bisect skips it."""
    verdict = judged(bench.run(broken(OURS, reduced=duplicated)), bench.run(FP32))
    (tmp_path / "script.py").write_text(text_of(verdict))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 125
    assert "run.py" in done.stderr


def test_two_runs_of_one_configuration_have_no_script(bench: Bench, tmp_path: Path) -> None:
    """What differs is not in their settings (other code?), so overrides do not make it."""
    wrong, run = bench.run(broken(OURS, reduced=duplicated)), bench.run(OURS)
    verdict = judged(wrong, run)
    assert verdict.outcome is Outcome.DIFFERENT
    assert script(verdict) is None


@pytest.mark.parametrize(
    "words",
    [
        ("model=odd", "engine=ddp", "dtype=bf16"),
        ("model=moe", "optimizer=sgd", "optimizer.clip_norm=null", "train.replicate=2"),
        ("data=text", "data.path='/a b/ü,c=d'", "numerics=ordered", "engine.transport=backend"),
        (
            *("fault.name=tests.faults.update:F20_norm_counts_replicas", "sharding=no_shard"),
            *("optimizer.betas=[0.8,0.99]", "cluster.threads_per_rank=2"),
        ),
        ("mesh=two_by_two", "engine=fsdp2", "ckpt=none", "train.warmup_steps=0"),
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


def test_a_store_that_takes_no_script_is_told_once(bench: Bench, tmp_path: Path) -> None:
    arm = copied(bench.run(broken(OURS, reduced=duplicated)), tmp_path)
    (arm / "verdict").touch()  # in the way, as a read-only file system is
    verdict = judged(arm, bench.run(FP32))
    found, complaint = scripted(verdict, verdict)
    assert complaint.count("no minimal script was written") == 1
    assert found == (verdict, verdict)
    (arm / "verdict").unlink()
    (written,), complaint = scripted(verdict)
    assert complaint == ""
    assert (arm / "verdict" / f"{bench.run(FP32).name}.py").is_file()
    assert written.script.startswith("python ")


@pytest.mark.parametrize("mended", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_really_finds_a_fault_of_the_engine_and_passes_without(
    mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ["sharding=optim", "train.global_batch_size=8", "train.microbatch_size=2", "train.steps=3"]
    cell += ["data.seq_len=16", "model.num_layers=1", "ckpt=none", f"launch.root={tmp_path}", "study.name=s"]
    monkeypatch.chdir(ROOT)
    done = run_program(["run.py", *cell, "-m", "fault=F01_duplicated_gradient,none"])
    assert done.returncode == 0, done.stdout + done.stderr
    control, arm = sorted((tmp_path / "s").glob("tiny*"), key=lambda path: "f01" in path.name)
    assert main(["compare", str(arm), str(control)]) == 1
    path = arm / "verdict" / f"{control.name}.py"
    assert f"next: python {shlex.quote(str(path))}\n" in capsys.readouterr().out
    shutil.rmtree(control)  # the script needs neither run
    text = path.read_text()
    if mended:
        path.write_text(text.replace("'fault.name=F01_duplicated_gradient'", "'fault.name=none'"))
    again = subprocess.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True)
    assert again.returncode == int(not mended), again.stdout + again.stderr
    assert ("BEYOND" in again.stdout) is not mended
    (made,) = tmp_path.glob("again-*/arm/*/*/config.yaml")
    assert RunDir(made.parent).config()["train"]["steps"] == 3
