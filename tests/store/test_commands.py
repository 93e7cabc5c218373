"""What is printed can be typed where it is printed, however the program was started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness import command
from harness.cli.failure import explained
from harness.cli.main import request_help
from harness.config.compose import compose_cell, composed
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.config.words import quote
from harness.store import commands, provenance
from harness.store.rundir import Store
from harness.study import replay
from tests.support.composing import compose
from tests.support.mutants import finds

RUN = provenance.ROOT / "run.py"


def test_from_a_checkout_and_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(provenance.ROOT)
    assert (commands.request("a=b"), commands.verb()) == ("python run.py a=b", "python -m harness")
    monkeypatch.chdir(tmp_path)
    assert commands.request() == f"python {shlex.quote(str(RUN))}"
    installed = tmp_path / "lib" / provenance.SHIPPED
    monkeypatch.setattr(commands, "ROOT", installed)
    assert commands.request("-m study=x") == "python -m harness run -m study=x"


def test_what_is_optional_is_installed_from_the_checkout_or_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's user was told `pip install '.[analysis]'`, in a folder with no package in it."""
    monkeypatch.setattr(commands, "python", lambda: "python")
    monkeypatch.chdir(provenance.ROOT)
    assert commands.install("wandb") == "python -m pip install '.[wandb]'"
    monkeypatch.setattr(commands, "ROOT", tmp_path / "lib" / provenance.SHIPPED)
    assert commands.install("wandb") == "python -m pip install 'sharding-harness[wandb]'"
    assert f'name = "{commands.DISTRIBUTION}"' in (provenance.ROOT / "pyproject.toml").read_text()


def test_where_python_is_another_its_path_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.python() == commands.shown(sys.executable)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    assert commands.verb("watch") == f"{commands.shown(sys.executable)} -m harness watch"


@pytest.mark.parametrize("on_path", [True, False])
def test_the_console_script_names_itself(on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "my bin" / "harness"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent if on_path else tmp_path))
    monkeypatch.setenv(commands.TYPED, "")  # restored at the end
    monkeypatch.setattr(sys, "argv", [str(script), "watch"])
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.cli.main.main", lambda: 0)
        assert command.main() == 0
    typed = "harness" if on_path else shlex.quote(str(script))
    assert (commands.request("a=b"), commands.verb("watch")) == (f"{typed} run a=b", f"{typed} watch")
    assert f"{typed} run -m study=parity_pair" in request_help()
    with pytest.raises(BadRequest) as caught:
        check_overrides(["sharding=optim,no_shard"])
    assert f"{typed} run -m sharding=optim,no_shard" in explained(caught.value)


def test_the_module_takes_run_too(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(provenance.ROOT)}
    words = [sys.executable, "-m", "harness", "run", "sharding=no_shard", "engine=single", "mesh=one"]
    done = subprocess.run(
        [*words, "launch.dry_run=true"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "dry run: nothing is written" in done.stdout
    assert compose_cell(composed(words[4:]), words[4:]).signature[:8] in done.stdout


@pytest.mark.parametrize("setting", ["unknown", "gone"])
def test_a_run_of_another_version_is_asked_for_by_its_words(setting: str, tmp_path: Path) -> None:
    """No file of conf/ is at fault; what was typed then is composed by the files of today."""
    root = f"launch.root={quote(str(tmp_path / 'runs'))}"
    run = Store(tmp_path / "runs").create(compose(["train.seed=3", "model=tiny", root]))
    provenance.record_start(run.path, {"git": {"sha": "0123456789abcdef", "dirty": False}}, "")
    config = run.config()
    if setting == "gone":
        del config["model"]["family"]
    else:
        config["engine"]["overlap"] = 3
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(BadRequest) as caught:
        replay.replay_run(str(run.path), ["train.seed=4", root])
    (found,) = caught.value.violations
    assert found.subject == f"{run.path}/config.yaml: {'model.family' if setting == 'gone' else 'engine.overlap'}"
    assert found.fix == f"ask for it anew, with the words of {run.path}/overrides.txt"
    if setting == "gone":  # and then the group is said whole
        assert replay.replay_run(str(run.path), ["model=tiny", root]).typed.model.name == "tiny"


test_a_mutant_is_found = finds(
    "The terminal",
    test_what_is_optional_is_installed_from_the_checkout_or_by_name="""
        install from nowhere: The user of a wheel is told to install from a folder without a package
            store.commands.install: ROOT.name == SHIPPED => False
    """,
    test_a_run_of_another_version_is_asked_for_by_its_words="""
        --from an old store: Who asks for a run of an old store is told to edit a file of conf/
            study.replay.replay_run: raise BadRequest(named) from error => raise error
            (setting="gone")
    """,
)
