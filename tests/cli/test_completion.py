"""TAB in a real bash, with the printed command typed; and `--help` on one screen."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.completion import BASH, candidates, install
from harness.cli.main import KINDS, REQUESTS, VERBS, main, request_help, verbs_help
from harness.config.catalog import load_catalog
from tests.parity.corpus import FP32, OURS
from tests.parity.lab import as_study, write
from tests.support.mutants import Slip, each, kills, slips
from tests.support.needs import needs

ASKED = {
    "python -m harness verd": ["verdict"],
    "python -m harness verdict ": ["lab"],
    "python -m harness verdict --his": ["--history"],
    "python run.py sharding=optim_": ["optim_grads", "optim_grads_params"],
    "python run.py -m sharding=optim,hf": ["optim,hfsdp"],
    "python run.py -m study=parity": ["parity_pair"],
    "harness run train.ste": ["train.steps="],
    "python run.py --from @l": ["@last"],
    "python run.py ckpt.load=@": ["@last"],
    "python run.py launch.root=elsewhere ckpt.load=": ["@last"],
    "ls -": [],
}
"""Half a line -> what bash puts there: behind the last `=`, which ends a word of bash's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one study, and the console script on the way."""
    here = tmp_path_factory.mktemp("shell")
    control, arm = (write(here / "runs", each) for each in (FP32, OURS))
    as_study(here / "runs", {control: None, arm: control}, "Is it the same?")
    for name, words in {"python": "", "harness": " -m harness"}.items():
        (here / "bin").mkdir(exist_ok=True)
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    return here


def test_runs_complete_where_a_request_names_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runs = {path.parent.name[-8:] for path in folder.glob("runs/lab/*/config.yaml")}
    assert len(runs) == 2
    assert set(candidates("python run.py --from ", VERBS)) == {"@last", *runs}
    assert set(candidates("python run.py -m ckpt.load=", VERBS)) == {f"ckpt.load={each}" for each in ("@last", *runs)}
    for one in runs:
        assert candidates(f"harness run --from {one[:5]}", VERBS) == [one]


def completes(folder: Path, begins: str) -> None:
    """bash has rules for both programs after the script `begins`, and puts there what `ASKED` says."""
    ask = 'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMPREPLY=(); _harness_completion; echo "[${COMPREPLY[*]}]"'
    asked = "\n".join([f"ask() {{ {ask}; }}", *(f"ask '{line}'" for line in ASKED)])
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = ["bash", "--norc", "-c", f"{begins}\ncomplete -p python harness\n{asked}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stderr == ""
    rules, answers = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    for rule, name in zip(rules, ("python", "harness"), strict=True):
        assert rule.endswith(f"-F _harness_completion {name}")
    assert answers == [f"[{' '.join(words)}]" for words in ASKED.values()]


@needs("bash")
def test_bash_completes_what_is_typed(folder: Path) -> None:
    completes(folder, install())


def test_groups_settings_options_and_runs_are_offered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert candidates("harness verd", VERBS) == ["verdict"]
    everything = candidates("python run.py ", VERBS)
    assert {f"{group}=" for group in load_catalog()} | {"train.steps=", "--cfg"} <= set(everything)
    assert candidates("python run.py -m study=parity_p", VERBS) == ["study=parity_pair"]
    assert candidates("python run.py cluster.device=", VERBS) == ["cluster.device=cpu", "cluster.device=cuda"]
    assert len([each for each in candidates("harness show ", VERBS) if len(each) == 8]) == 2
    assert candidates("harness verdict --root=runs ", VERBS) == candidates("harness verdict ", VERBS) != []
    for nowhere in (f"--root {folder}/nowhere", f"--root={folder}/nowhere"):
        assert candidates(f"harness verdict {nowhere} ", VERBS) == []
    assert candidates("harness nope ", VERBS) == candidates("python other.py ", VERBS) == []


def test_help_begins_with_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs, request = capsys.readouterr().out.splitlines(), request_help().splitlines()
    assert max(map(len, [*verbs, *request])) <= 80
    assert len(verbs) <= 28
    assert request.index("Groups and their options:") < 20


@pytest.mark.parametrize("columns", ["80", "60"])
@pytest.mark.parametrize("depth", [0, 30])
def test_help_is_no_wider_than_the_terminal(columns: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and the checkout may lie deep: a command is then alone on its line, and what it does below it."""
    monkeypatch.setenv("COLUMNS", columns)
    python = f"/home/{'x' * depth}/bin/python" if depth else "python"
    monkeypatch.setattr("harness.store.commands.request", lambda words="": f"{python} run.py {words}".rstrip())
    monkeypatch.setattr("harness.store.commands.verb", lambda words="": f"{python} -m harness {words}".rstrip())
    commands = [f"{python} run.py {words}".rstrip() for words in REQUESTS] + [f"{python} -m harness --help"]
    lines = [*request_help().splitlines(), *verbs_help(f"{python} -m harness", KINDS).splitlines()]
    assert not [line for line in lines if len(line) > int(columns) and line not in commands]
    for words, about in REQUESTS.items():
        place = next(n for n, line in enumerate(lines) if line.startswith(f"{python} run.py {words}".rstrip()))
        assert about in lines[place] + lines[place + 1]


@kills("The terminal", "help of one width", "--help is as wide on any terminal")
def test_help_of_one_width_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cli.main.screen.width", lambda: 1000)
    with pytest.raises(AssertionError):
        test_help_is_no_wider_than_the_terminal("60", 0, monkeypatch)


MUTANTS: dict[str, Slip] = slips(
    """
    no verbs: TAB after the program offers `run` alone, and none of the other verbs
        cli.completion._verb: *(verb.name for verb in verbs), =>
    run.py is not known: TAB after `python run.py` offers files
        cli.completion._after_program: == "run.py" => == "run"
    --from asks for a setting: TAB after `--from` offers groups and settings instead of runs
        cli.completion._request: words[-1:] == ["--from"] => words[-1:] == ["--resume"]
    no run after ckpt.load=: TAB after `ckpt.load=` offers nothing
        cli.completion._request: key == "ckpt.load" => key == "ckpt"
    no options of a group: TAB after `study=`, or another group, offers none of its options
        cli.completion._request: load_catalog().get(key) or =>
    runs of another store: TAB offers the runs of the default store, whatever --root or launch.root= say
        cli.completion._root: return next(itertools.chain(joined, apart), "runs") => return "runs"
    """
)


def check_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_runs_complete_where_a_request_names_one(folder, monkeypatch)
    test_groups_settings_options_and_runs_are_offered(folder, monkeypatch)


@pytest.mark.parametrize("name", each("Completion", MUTANTS))
def test_a_mutant_of_completion_is_found(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].put(monkeypatch)
    with pytest.raises(AssertionError):
        check_all(folder, monkeypatch)


@needs("bash")
@kills(
    "Completion", "a setting twice", "bash puts the whole word behind the last `=`, so that a setting is there twice"
)
def test_a_setting_that_is_there_twice_is_found(folder: Path) -> None:
    part = 'COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")'
    assert BASH.count(part) == 1
    with pytest.raises(AssertionError):
        completes(folder, BASH.replace(part, ":"))
