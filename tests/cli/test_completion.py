"""TAB in a real bash, with the printed command typed; and `--help` on one screen."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.completion import candidates, install
from harness.cli.help import REQUESTS, request_help, verbs_help
from harness.cli.main import main
from harness.cli.verbs import KINDS, VERBS
from harness.config.catalog import load_catalog
from tests.parity.corpus import FP32, OURS
from tests.parity.lab import as_study, write
from tests.support.mutants import kills
from tests.support.needs import needs

ASKED = {
    "python -m harness verd": ["verdict"],
    "python -m harness verdict ": ["lab"],
    "python -m harness verdict --ex": ["--explain"],
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


@needs("bash")
def test_bash_completes_what_is_typed(folder: Path) -> None:
    ask = 'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMPREPLY=(); _harness_completion; echo "[${COMPREPLY[*]}]"'
    asked = "\n".join([f"ask() {{ {ask}; }}", *(f"ask '{line}'" for line in ASKED)])
    script = f"{install()}\ncomplete -p python harness\n{asked}"
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stderr == ""
    rules, answers = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert [
        rule.endswith(f"-F _harness_completion {name}") for rule, name in zip(rules, ("python", "harness"), strict=True)
    ]
    assert answers == [f"[{' '.join(words)}]" for words in ASKED.values()]


def test_groups_settings_options_and_runs_are_offered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    everything = candidates("python run.py ", VERBS)
    assert {f"{group}=" for group in load_catalog().groups} | {"train.steps=", "--cfg"} <= set(everything)
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
    monkeypatch.setattr("harness.cli.help.screen.width", lambda: 1000)
    with pytest.raises(AssertionError):
        test_help_is_no_wider_than_the_terminal("60", 0, monkeypatch)
