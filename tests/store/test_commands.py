"""What is printed can be typed where it is printed, however the program was started."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import command
from harness.cli.failure import explained
from harness.cli.help import request_help
from harness.cli.main import main
from harness.config.compose import compose_cell, composed
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.store import commands, provenance
from tests.support.mutants import Slip, kills

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


@kills("The terminal", "install from nowhere", "The user of a wheel is told to install from a folder without a package")
def test_an_install_from_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(commands, "install", "ROOT.name == SHIPPED", "False").put(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_is_optional_is_installed_from_the_checkout_or_by_name(tmp_path, monkeypatch)


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
    typed = "harness" if on_path else "'my bin/harness'"
    assert (commands.request("a=b"), commands.verb("watch")) == (f"{typed} run a=b", f"{typed} watch")
    assert f"{typed} run -m study=parity_pair" in request_help()
    assert f"{typed} --help" in request_help()
    with pytest.raises(BadRequest) as caught:
        check_overrides(["sharding=optim,no_shard"])
    assert f"{typed} run -m sharding=optim,no_shard" in explained(caught.value)
    assert main(["watch", "nothing", "--root", str(tmp_path)]) == 2


def literals(file: Path) -> Iterator[str]:
    """Text of a source that is no docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


WRITTEN = ("config/doc.py", "store/fields.py", "store/commands.py", "worker/__main__.py", "checkpoint/__main__.py")
"""Texts of pages and of programs that no user starts, and the place that decides."""


def test_one_place_decides_the_words() -> None:
    found = {
        f"{file.relative_to(provenance.PACKAGE)}: {text}"
        for file in provenance.PACKAGE.rglob("*.py")
        for text in literals(file)
        if "python run.py" in text or "python -m harness" in text
    }
    wrong = {each for each in found if not each.startswith(WRITTEN) and "A store of runs." not in each}
    assert not wrong
    assert found, "this looks at what it says"


def test_the_module_takes_run_too(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(provenance.ROOT)}
    words = [sys.executable, "-m", "harness", "run", "sharding=no_shard", "engine=single", "mesh=one"]
    done = subprocess.run(
        [*words, "launch.dry_run=true"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "dry run: nothing is written" in done.stdout
    assert compose_cell(composed(words[4:]), words[4:]).signature[:8] in done.stdout
