"""The engine is used through few names; its inside is read by its own tests and benchmarks alone.

Counted from the sources as text: imports, and strings that are a dotted path, by which tests patch. The *door* is
`harness.fsdp` itself; its torch-free *declarations* may be read too; everything else of the engine is its *inside*.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.places import Copy
from tests.architecture.test_layers import CONTRACTS, ROOT
from tests.support.mutants import each, kills

AREA = "The engine's door"
WITHOUT_TORCH = next(each for each in CONTRACTS if "torch" in each.get("forbidden_modules", ()))
ENGINE = "harness.fsdp"
DECLARATIONS = (f"{ENGINE}.options",)
OWN = ("harness/plan", "tests/fsdp", "tests/streams", "tests/faults", "benchmarks/fsdp", "benchmarks/gpu/products.py")
"""Tests and benchmarks of the engine's inside, the faults that are put into it, and what plans with its layouts."""
MOST_NAMES = 12
"""Of the door, for everybody else."""
SOURCES = ("harness", "hydra_plugins", "run.py", "analysis", "benchmarks", "tests")
PATH = re.compile(rf"{re.escape(ENGINE)}(\.\w+)+")

Uses = dict[str, dict[str, set[str]]]
"""Names of the engine that a package uses, by package and kind (door, declarations or inside)."""


def paths(source: str) -> Iterator[str]:
    """Dotted paths that a source imports or names in a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == ENGINE:
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value):
            yield node.value


def kind_of(path: str) -> str:
    if any(f"{path}.".startswith(f"{each}.") for each in DECLARATIONS):
        return "declarations"
    name = path.removeprefix(f"{ENGINE}.")
    inside = ROOT / "harness" / "fsdp"
    is_module = "." in name or (inside / f"{name}.py").exists() or (inside / name / "__init__.py").exists()
    return "inside" if is_module else "door"


def package_of(path: str) -> str:
    """The engine's own by its entry in `OWN`, any other by its folder's first two parts."""
    own = next((each for each in OWN if path == each or path.startswith(f"{each}/")), None)
    parts = path.split("/")
    return own or "/".join(parts[: min(2, len(parts) - 1)]) or path


def look(root: Path) -> Uses:
    found: Uses = defaultdict(lambda: defaultdict(set))
    for top in (root / source for source in SOURCES):
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            name = file.relative_to(root).as_posix()
            if file.exists() and not name.startswith("harness/fsdp/"):
                for path in paths(file.read_text(encoding="utf-8")):
                    if path.startswith(f"{ENGINE}.") and not path.endswith("__"):
                        found[package_of(name)][kind_of(path)].add(path.removeprefix(f"{ENGINE}."))
    return dict(found)


def names(found: Uses, kind: str, *, own: bool = False) -> set[str]:
    """Distinct names of one kind over the packages that are the engine's own, or over all others."""
    return set().union(*(each[kind] for package, each in found.items() if (package in OWN) == own))


def faults(found: Uses) -> list[str]:
    told = [
        f"{package} imports {', '.join(sorted(each['inside']))} of {ENGINE}: take it through {ENGINE}"
        for package, each in found.items()
        if package not in OWN and each["inside"]
    ]
    used = names(found, "door")
    if len(used) > MOST_NAMES:
        told.append(f"{len(used)} names of {ENGINE} are used, and {MOST_NAMES} is the most: {', '.join(sorted(used))}")
    return told


@cache
def now() -> Uses:
    return look(ROOT)


def test_at_most_twelve_names_of_the_engine_are_used() -> None:
    assert faults(now()) == []
    assert len(names(now(), "door")) > 8, "names are counted"
    assert len(names(now(), "inside", own=True)) > 90, "the engine's own tests read its inside"


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
    copy.insert("harness/store/identity.py", "from harness.fsdp.comm import events\n", before="EXCLUDED = (")
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
