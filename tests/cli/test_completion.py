"""TAB in a real bash, with the printed command typed; and `--help` on one screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.completion import candidates, install
from harness.cli.help import request_help
from harness.cli.main import main
from harness.config.catalog import load_catalog
from tests.parity.corpus import FP32, OURS
from tests.parity.lab import as_study, write

ASKED = {
    "python -m harness verd": ["verdict"],
    "python -m harness verdict ": ["lab"],
    "python -m harness verdict --ex": ["--explain"],
    "python run.py sharding=optim_": ["optim_grads", "optim_grads_params"],
    "python run.py -m sharding=optim,hf": ["optim,hfsdp"],
    "python run.py -m study=parity": ["parity_pair"],
    "harness run train.ste": ["train.steps="],
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
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (here / "bin" / name).chmod(0o755)
    return here


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
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
    everything = candidates("python run.py ")
    assert {f"{group}=" for group in load_catalog().groups} | {"train.steps=", "--cfg"} <= set(everything)
    assert candidates("python run.py cluster.device=") == ["cluster.device=cpu", "cluster.device=cuda"]
    assert len([each for each in candidates("harness show ") if len(each) == 8]) == 2
    assert candidates(f"harness verdict --root {folder}/nowhere ") == []
    assert candidates("harness nope ") == candidates("python other.py ") == []


def test_help_begins_with_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs, request = capsys.readouterr().out.splitlines(), request_help().splitlines()
    assert max(map(len, [*verbs, *request])) <= 80
    assert len(verbs) <= 28
    assert request.index("Groups and their options:") < 20
    assert request[-1].endswith("wrong_targets"), "what fills a screen comes last"
