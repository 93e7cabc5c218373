"""The Pythons and torches that the package names: the front end without torch, and two ranks wherever there is a torch.

Interpreters are looked for on PATH as python3.11 to python3.13; HARNESS_PYTHONS lists others, with `:` between them. A
torch is never fetched, as it may come with gigabytes of CUDA: it is tried where an interpreter has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from harness.store.provenance import ROOT
from tests.report.stores import whole

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSIONS = ("3.11", "3.12", "3.13")
LISTED = [each for each in os.environ.get("HARNESS_PYTHONS", "").split(os.pathsep) if each]
ASK = "import sys, importlib.util as u; print('%d.%d' % sys.version_info[:2], u.find_spec('torch') is not None)"


def ran(*words: str | Path, cwd: Path, fails: bool = False, **more: str) -> str:
    """What a program prints; its failure is the test's unless it may."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HARNESS_TYPED")} | more
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert fails or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout if done.returncode == 0 else ""


@cache
def known() -> dict[str, list[tuple[Path, bool]]]:
    """Interpreters by version, and whether each has a torch. A shim of pyenv is one where it finds that version."""
    found: dict[str, list[tuple[Path, bool]]] = {version: [] for version in VERSIONS}
    named = [(shutil.which(f"python{version}"), version) for version in VERSIONS]
    for python, version in [*named, *((each, "") for each in LISTED)]:
        if python is not None:
            more = {"PYENV_VERSION": version} if version else {}
            path = ran(python, "-c", "import sys; print(sys.executable)", cwd=ROOT, fails=True, **more).strip()
            told = ran(path, "-c", ASK, cwd=ROOT, fails=True).split() if path else []
            if told and told[0] in found and (Path(path), told[1] == "True") not in found[told[0]]:
                found[told[0]].append((Path(path), told[1] == "True"))
    return found


def environment(python: Path, folder: Path, wheel: Path, wanted: list[str]) -> Path:
    """A new environment over an interpreter with our wheel, and packages from the registry; returns its interpreter."""
    ran(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    made = folder / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", str(made), "install", "--quiet", "--no-compile")
    ran(*install, "--no-deps", "--no-index", wheel, cwd=folder.parent)
    if wanted:
        done = subprocess.run([*install, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip finds no packages for {python}: {done.stderr.strip().splitlines()[-1]}")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    ran(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


def without_torch() -> list[str]:
    """What the front end and its readers need."""
    needed = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["analysis"][:2]]
    return [each for each in needed if not each.startswith("torch")]


IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    package = importlib.import_module(name)
    for each in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
print(len(sys.modules), "torch" in sys.modules)
"""


def imported(python: Path, names: list[str], folder: Path) -> str:
    """How many modules were imported with these packages and all below, and whether torch was."""
    return ran(python, "-W", "error::SyntaxWarning", "-c", IMPORT_ALL, json.dumps(names), cwd=folder)


def rooms(title: str) -> list[str]:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    return next(each["source_modules"] for each in contracts if each["name"].startswith(title))


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_desk_judges_without_torch(version: str, wheel: Path, tmp_path: Path) -> None:
    """Another interpreter imports every package of the front end, previews, judges and reports as this one does."""
    if not known()[version]:
        pytest.skip(f"no python{version} on PATH or in HARNESS_PYTHONS")
    python = environment(known()[version][0][0], tmp_path / "venv", wheel, without_torch())
    home = ran(python, "-c", "import harness, os; print(os.path.dirname(harness.__file__))", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(tmp_path)
    ran(python, "-W", "error", "-m", "compileall", "-q", "-f", home, cwd=tmp_path)
    for title in ("The front end, the store and the readers", "The engine's words and declarations"):
        assert imported(python, rooms(title), tmp_path).endswith(" False\n"), "none of them imports torch"
    arm = whole(tmp_path / "runs")
    typed = python.with_name("harness")
    as_here = {"HARNESS_TYPED": str(typed.relative_to(tmp_path)), "PYTHONPATH": str(ROOT)}
    for words in (["verdict", "lab"], ["watch", "lab"], ["show", str(arm)]):
        assert ran(typed, *words, cwd=tmp_path) == ran(sys.executable, "-m", "harness", *words, cwd=tmp_path, **as_here)
    assert ran(typed, "report", "lab", cwd=tmp_path)
    assert "<html" in (tmp_path / "runs" / "lab" / "report.html").read_text(encoding="utf-8")
    assert "2 cells; dry run" in ran(typed, "run", "-m", "sharding=optim,no_shard", "launch.dry_run=true", cwd=tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_two_ranks_train_and_are_judged(version: str, wheel: Path, tmp_path: Path) -> None:
    """ZeRO-3 on two ranks against one process: to the bit where sums are exact, within rounding where they are fast."""
    having = [python for python, torch in known()[version] if torch]
    if not having:
        pytest.skip(f"no python{version} on PATH or in HARNESS_PYTHONS has a torch")
    for number, python in enumerate(having):
        (tmp_path / str(number)).mkdir()
        trained_and_judged(python, wheel, tmp_path / str(number))


def trained_and_judged(python: Path, wheel: Path, folder: Path) -> None:
    whole_already = ran(
        python, "-c", "import hydra, safetensors, scipy, submitit, xxhash; print(1)", cwd=folder, fails=True
    )
    made = environment(python, folder / "venv", wheel, [] if whole_already else without_torch())
    there = ran(python, "-c", "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))", cwd=folder)
    home = ran(made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(home, "torch.pth").write_text(f"import sys; sys.path.append({there.strip()!r})\n")
    imported(made, ["harness.fsdp", "harness.models", "harness.train", "harness.checkpoint", "harness.worker"], folder)
    small = ("train.steps=2", "train.global_batch_size=4", "train.microbatch_size=2", "train.warmup_steps=0")
    typed, study = made.with_name("harness"), ("run", "-m", "study=parity_pair")
    for numerics, outcome in (("exact", "EQUAL"), ("fast", "EQUIVALENT")):
        assert "2 ranks" in ran(typed, *study, *small, f"numerics={numerics}", cwd=folder)
        assert ran(typed, "verdict", "parity_pair", cwd=folder).startswith(f"{outcome}: ")
