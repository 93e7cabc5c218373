"""TAB in a real bash, with the printed command typed; and `--help` on one screen."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import completion
from harness.cli.completion import install
from harness.cli.main import main, request_help
from harness.config.catalog import ROOT
from tests.parity.lab import pair
from tests.support.mutants import finds
from tests.support.needs import needs

ASKED = {
    "python -m harness verd": ["verdict"],
    "python -m harness verdict ": ["lab"],
    "harness re": ["report", "retry"],
    "python run.py --from @l": ["@last"],
    "python run.py sharding=optim_": [],
    "ls -": [],
}
"""Half a line -> what bash puts there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one study, and the console script on the way."""
    here = tmp_path_factory.mktemp("shell")
    pair(here / "runs")
    for name, words in {"python": "", "harness": " -m harness"}.items():
        (here / "bin").mkdir(exist_ok=True)
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    return here


def test_runs_complete_where_one_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runs = {path.parent.name[-8:] for path in folder.glob("runs/lab/*/config.yaml")}
    assert len(runs) == 2
    assert set(completion.candidates("python run.py --from ")) == {"@last", *runs}
    assert set(completion.candidates("harness show ")) == {"@last", *runs}
    for one in runs:
        assert completion.candidates(f"harness run --from {one[:5]}") == [one]


def completes(folder: Path, begins: str) -> None:
    """bash has rules for both programs after the script `begins`, and puts there what `ASKED` says."""
    ask = 'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMPREPLY=(); _harness_completion; echo "[${COMPREPLY[*]}]"'
    asked = "\n".join([f"ask() {{ {ask}; }}", *(f"ask '{line}'" for line in ASKED)])
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
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


def test_verbs_and_studies_are_offered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert completion.candidates("harness verd") == ["verdict"]
    for words in ("harness verdict --root=runs ", "harness verdict "):
        assert completion.candidates(words) == ["lab"]
    nowhere = (f"harness verdict --root{sign}{folder}/nowhere " for sign in " =")
    for words in (*nowhere, "python run.py ", "harness nope ", "python other.py "):
        assert completion.candidates(words) == []


def test_help_begins_with_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs, request = capsys.readouterr().out.splitlines(), request_help().splitlines()
    assert max(map(len, [*verbs, *request])) <= 80
    assert len(verbs) <= 28
    assert request.index("Groups and their options:") < 20


test_a_mutant_is_found = finds(
    "Completion",
    test_verbs_and_studies_are_offered="""
        no verbs: TAB after the program offers `run` alone, and none of the other verbs
            cli.completion.candidates: *(verb.name for verb in VERBS), =>
        run.py is not known: TAB after `python run.py` offers verbs
            cli.completion.candidates: 3 if words[1:3] == ["-m", "harness"] else 1 => 3
    """,
    test_runs_complete_where_one_is_named="""
        --from asks for a setting: TAB after `--from` offers no run
            cli.completion.candidates: words[-1:] == ["--from"] => words[-1:] == ["--resume"]
        runs of another store: TAB offers the runs of the default store, whatever --root or launch.root= say
            cli.completion._named: next(itertools.chain(joined, apart), "runs") => "runs"
            test_verbs_and_studies_are_offered
    """,
)
