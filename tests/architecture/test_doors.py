"""The engine is used through few names; its inside is read by its own tests and benchmarks alone."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks.doors import MOST_NAMES, ROOT, faults, look, names
from tests.architecture.places import Copy
from tests.architecture.test_layers import CONTRACTS
from tests.support.mutants import each, kills

AREA = "The engine's door"
WITHOUT_TORCH = next(each for each in CONTRACTS if "torch" in each.get("forbidden_modules", ()))


@cache
def now() -> dict[str, dict[str, Any]]:
    return look(ROOT)


def test_at_most_twelve_names_of_the_engine_are_used() -> None:
    assert faults(now()) == []
    assert len(names(now(), "door")) > 8, "names are counted"
    assert len(names(now(), "inside", own=True)) > 100, "the engine's own tests read its inside"


ADDED = {
    "a module": "from harness.fsdp.comm import events",
    "a module of the door": "from harness.fsdp import module",
    "in a function": "def read():\n    from harness.fsdp.storage.param_group import ParamGroup\n    return ParamGroup",
    "by its path": "import harness.fsdp.comm.events as events",
    "patched": "from unittest import mock\nmock.patch('harness.fsdp.update.norms.gradient_norm')",
    "looked up": "import harness.fsdp\nharness.fsdp.api.fully_shard",
    "names": "from harness.fsdp import " + ", ".join(f"Name{number}" for number in range(MOST_NAMES + 1)),
}


@pytest.mark.parametrize("how", each(AREA, ((how, f"A test imports {how}") for how in ADDED)))
def test_an_import_that_is_added_is_found(how: str, tmp_path: Path) -> None:
    file = tmp_path / "tests" / "added" / "test_added.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"{ADDED[how]}\n", encoding="utf-8")
    assert faults(now() | look(tmp_path)) != []
    assert faults(now()) == []


@kills(AREA, "an import of the product", "A package of the product imports the engine's inside")
def test_import_linter_keeps_the_product_out_of_the_inside(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    lint = ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")
    command = (*lint, "--contract", "one-door")
    kept = copy.run(*command)
    assert (kept.returncode, "One door" in kept.stdout) == (0, True), kept.stdout
    copy.insert("harness/store/identity.py", "\nfrom harness.fsdp.comm import events\n")
    broken = copy.run(*command)
    assert broken.returncode == 1, broken.stdout
    assert "harness.store.identity -> harness.fsdp.comm.events" in broken.stdout


def imported_without_torch(used: set[str]) -> bool:
    """Whether these names of the door can be imported where torch is not."""
    code = f"import sys; from harness.fsdp import {', '.join(sorted(used))}; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_names_that_the_desk_uses_need_no_torch() -> None:
    packages = {module.replace(".", "/") for module in WITHOUT_TORCH["source_modules"]} & now().keys()
    used = {name for package in packages for name in now()[package]["door"]}
    assert used, "the front end predicts by the engine's placements"
    assert imported_without_torch(used)
    assert not imported_without_torch({*used, "create_state"})
