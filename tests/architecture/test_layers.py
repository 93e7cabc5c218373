"""The layers of docs/architecture.md hold: every package exists, import-linter holds the order it is drawn in, and no
file is too long to read in one go."""

from __future__ import annotations

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from tests.support.needs import needs_checkout

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
LAYERS = [
    [set(re.split(r" [|:] ", layer)) for layer in each["layers"]] for each in CONTRACTS if each["type"] == "layers"
]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLES = [
    re.findall(r"`([\w./]+)`", each)
    for each in re.split(r"\n\| [a-z ]+ \| \|\n", PAGE.partition("\n## Where to look")[0])[1:]
]
NAMED = list(chain(*TABLES))
MOST_LINES = 450
"""Of a file; one noun a file needs fewer."""


def module_of(path: str) -> str:
    return path.removesuffix(".py").strip("/").replace("/", ".")


def held(table: list[str]) -> list[tuple[str, str]]:
    """Pairs of packages of one table that a contract keeps apart, the upper one first."""
    packages = {module_of(path) for path in table}
    floors = ([sorted(floor & packages) for floor in contract] for contract in LAYERS)
    return [
        (upper, lower)
        for contract in floors
        for height, floor in enumerate(contract)
        for upper in floor
        for lower in chain(*contract[height + 1 :])
    ]


def test_the_page_names_every_package_that_exists() -> None:
    packages = [path.parent for folder in ("harness", "harness/fsdp") for path in (ROOT / folder).glob("*/__init__.py")]
    missing = {path.relative_to(ROOT).as_posix() for path in packages} - set(NAMED)
    assert not missing, f"docs/architecture.md does not name {sorted(missing)}"
    assert not [path for path in NAMED if not (ROOT / path).exists()], "docs/architecture.md names what is not there"


def test_every_room_and_every_file_of_the_engine_is_in_a_contract() -> None:
    """Also the engine's files beside its packages, which docs/architecture.md does not name."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "harness/fsdp").glob("*.py")}
    wanted = {path for path in NAMED if path.startswith("harness/")} | files - {"harness/fsdp/__init__.py"}
    free = {path for path in wanted if module_of(path) not in set(chain(*chain(*LAYERS)))}
    assert not free, f"in no layers contract of pyproject.toml: {sorted(free)}"


@pytest.mark.parametrize("table", range(len(TABLES)))
def test_rooms_stand_in_the_order_that_import_linter_holds(table: int) -> None:
    packages = [module_of(path) for path in TABLES[table]]
    pairs = held(TABLES[table])
    assert pairs, "nothing is held"
    wrong = [(upper, lower) for upper, lower in pairs if packages.index(upper) > packages.index(lower)]
    assert not wrong, f"drawn above what it imports: {wrong}"


def test_the_desk_and_the_readers_are_kept_from_torch() -> None:
    without = next(each for each in CONTRACTS if "torch" in each.get("forbidden_modules", ()))
    packages = {module_of(path) for path in chain(*TABLES[:2]) if path.count("/") == 1 and path.startswith("harness/")}
    assert packages == set(without["source_modules"])


def test_the_rank_is_kept_from_the_desk_and_the_readers() -> None:
    """But for config and store, which both halves read."""
    named = "The rank never imports the front end or the readers"
    kept = next(each for each in CONTRACTS if each["name"] == named)
    above, readers, rank, _ = ({module_of(path) for path in table if path.startswith("harness/")} for table in TABLES)
    packages = {package for package in above | readers if package.count(".") == 1}
    assert set(kept["forbidden_modules"]) == packages - {"harness.config", "harness.store"}
    alone = {"harness.fsdp", "harness.shm", "harness.watchdog"}
    assert set(kept["source_modules"]) == rank - alone


def lengths(root: Path) -> dict[str, int]:
    """Lines of every Python file that git tracks below a folder, by its path."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    paths = (path for path in listed.stdout.split("\0") if path and (root / path).exists())
    return {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in paths}


@needs_checkout()
def test_no_file_is_over_its_limit_of_lines() -> None:
    found = lengths(ROOT)
    assert found[Path(__file__).relative_to(ROOT).as_posix()] > 80, "this file is counted too"
    over = {path: lines for path, lines in found.items() if lines > MOST_LINES}
    assert not over, f"over {MOST_LINES} lines: {over}; give a second noun a file of its own"
