"""README's next line in a shell that has not activated `.venv`: one line says what is missing and what to type."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from harness.config.catalog import ROOT
from harness.store import interpreter
from tests.support.mutants import each
from tests.support.needs import needs

FILES = ("run.py", "harness/store/interpreter.py", "harness/command.py", "harness/__main__.py")
"""What an interpreter reads before it is found wanting."""


def bare(folder: Path) -> Path:
    """An environment without a package; returns its interpreter."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare(tmp_path_factory.mktemp("interpreters") / "a bare one")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of a clone, in a folder whose name has a space and a quote."""
    folder = tmp_path / "a friend's checkout"
    for name in ("harness", "hydra_plugins", "conf", "sweeps"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("run.py", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def typed(python: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HARNESS", "VIRTUAL_ENV"))}
    return subprocess.run([python, *words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=60, check=False)


def told(python: Path, *words: str, cwd: Path) -> str:
    done = typed(python, *words, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(r"bad request: \S.*; activate the environment .*\n", done.stderr), done.stderr
    return done.stderr


def test_what_is_missing_is_named(python: Path, checkout: Path) -> None:
    for words, cwd in (((str(checkout / "run.py"),), checkout.parent), (("-m", "harness", "watch"), checkout)):
        assert f"bad request: {shlex.quote(str(python))} lacks hydra; " in told(python, *words, cwd=cwd)


def test_an_interpreter_that_is_too_old_is_told_so(python: Path, checkout: Path) -> None:
    """By a version that is said to be another; and Python 3.6 can read all that comes before."""
    for how in ("run_path('run.py'", "run_module('harness'"):
        code = f"import runpy, sys; sys.path.insert(0, '.'); sys.version_info = (3, 10); runpy.{how}, None, '__main__')"
        what = told(python, "-c", code, cwd=checkout)
        assert "3.11 is the oldest" in what
    for name in FILES:
        text = (checkout / name).read_text(encoding="utf-8")
        ast.parse(text, name, feature_version=(3, 6))
        assert "from __future__ import annotations" not in text, "which Python 3.7 was the first to have"


@needs("make")
def test_no_environment_is_made_of_one_that_is_too_old(checkout: Path) -> None:
    """pip would say that there is no such torch."""
    shutil.copy(ROOT / "constraints.txt", checkout)
    old = checkout / "python3"
    code = "import sys; sys.version_info = (3, 9); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    old.chmod(0o755)
    make = ["make", f"PYTHON={old}", "install"]
    done = subprocess.run(make, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Python 3.9, and 3.11 is the oldest that can be used; type: make PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_the_dependencies_are_those_of_the_package() -> None:
    """But for torch, which whoever only reads verdicts need not have."""
    named = {name: found for name, found in metadata.packages_distributions().items() if name in interpreter.NEEDED}
    needs = metadata.requires("sharding-harness") or []
    wanted = {re.split(r"[<>=;\[ ]", each)[0] for each in needs if "extra ==" not in each}
    assert {each.lower() for (each, *_) in named.values()} == wanted - {"torch"}


MUTANTS = """
run.py asks too late: run.py imports what the interpreter lacks before it asks
    test_what_is_missing_is_named | run.py | interpreter.require() | pass
verbs ask too late: A verb imports what the interpreter lacks before it asks
    test_what_is_missing_is_named | harness/command.py | interpreter.require() | pass
old: An interpreter that is too old is told to install packages
    test_an_interpreter_that_is_too_old_is_told_so | harness/store/interpreter.py
    | if sys.version_info < OLDEST: | if not sys.version_info:
old, and installed: make installs into an interpreter that is too old
    test_no_environment_is_made_of_one_that_is_too_old | Makefile | sys.version_info >= (3, 11) | True
unreadable: An old interpreter cannot read the file that refuses it
    test_an_interpreter_that_is_too_old_is_told_so | harness/store/interpreter.py
    | lack = lacking()\\n    if lack: | if lack := lacking():
"""
"""Name, mistake; check, file, and what is changed in it."""
ROWS = {
    name: (breaks, [part.strip().replace("\\n", "\n") for part in edit.split("|")])
    for name, breaks, edit in re.findall(r"^(\S[^:\n]*): (.*)\n((?: .*\n)+)", MUTANTS, re.M)
}


@pytest.mark.parametrize("name", each("The terminal", [(name, breaks) for name, (breaks, _) in ROWS.items()]))
def test_mutants_are_found(name: str, request: pytest.FixtureRequest, checkout: Path) -> None:
    check_name, file, old, new = ROWS[name][1]
    check = globals()[check_name]
    text = (checkout / file).read_text(encoding="utf-8")
    assert text.count(old) in (1, 2), f"{old!r} stands {text.count(old)} times in {file}"
    (checkout / file).write_text(text.replace(old, new), encoding="utf-8")
    wanted = inspect.signature(check).parameters
    with pytest.raises((AssertionError, SyntaxError)):
        check(**{each: request.getfixturevalue(each) for each in wanted})
