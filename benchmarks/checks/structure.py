"""The structure in numbers, of this checkout beside earlier revisions: files, lines, packages, arrows.

    python benchmarks/checks/structure.py

A *package* is a folder or a file directly in a package; an *arrow* is a pair of packages of which one imports the
other; arrows both ways are a *circle*. Counted from the sources as text, for `harness` and for the engine,
`harness/fsdp`; and the size of product, tests and benchmarks, package by package. Writes
benchmarks/data/structure.json and docs/records/structure.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parents[1] / "data" / "structure.json"
PAGE = ROOT / "docs" / "records" / "structure.md"
REVISIONS = {
    "9fd760c": "before the files were moved into packages",
    "d2bca67": "with the packages, before tensor parallelism, FP8 and what ordinary programs need",
    "5135ba6": "before the ground was cleared for another engine",
}
SIZED = "5135ba6"
"""The revision whose sizes stand beside those of this checkout."""
WHOLES = {"product": ("harness", "hydra_plugins", "run.py"), "tests": ("tests",), "benchmarks": ("benchmarks",)}
SIZES = ("files", "lines", "statements", "characters")
PACKAGES = ("harness", "harness.fsdp")
HEAD = """# The structure in numbers

*Record. How many files, lines, packages and arrows the package and its engine have, and how large product, tests and
benchmarks are. Made by `python benchmarks/checks/structure.py`; the data are in `benchmarks/data/structure.json`.*

A *package* is a folder or a file directly in a package; an *arrow* is a pair of them of which one imports the other;
arrows both ways are a *circle*. The order in which packages may import each other is drawn in docs/architecture.md and
held by import-linter.
"""


def modules(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package, by dotted name."""
    folder = root.joinpath(*package.split("."))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def package_of(module: str, package: str) -> str:
    """The package of a module: its first part below the package."""
    return module.removeprefix(f"{package}.").partition(".")[0]


def arrows(found: dict[str, Path], package: str) -> set[tuple[str, str]]:
    """Pairs of packages: the importing one and the imported one."""
    pairs = {
        (package_of(module, package), package_of(name, package))
        for module, path in found.items()
        for name in imported(path)
        if module != package and name.startswith(f"{package}.")
    }
    return {(one, other) for one, other in pairs if one != other}


def structure(root: Path, package: str) -> dict[str, Any]:
    """Counts of one package."""
    found = modules(root, package)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in found.items()}
    packages = {package_of(name, package) for name in found if name != package}
    pairs = {pair for pair in arrows(found, package) if set(pair) <= packages}
    longest = max(lines, key=lambda name: lines[name])
    return {
        "files": len([count for count in lines.values() if count]),
        "lines": sum(lines.values()),
        "packages": len(packages),
        "arrows": len(pairs),
        "circles": sorted([list(pair) for pair in pairs if pair[::-1] in pairs and pair[0] < pair[1]]),
        "longest_file": [longest, lines[longest]],
    }


CONSTRUCTORS = {"sharding.py": "shard", "model.py": "__init__"}
"""What constructs a sharded model, by file."""


def lines_of_init(root: Path) -> int:
    """Lines of `shard`, signature included; of older revisions, of `ShardedModel.__init__`."""
    engine = root / "harness" / "fsdp"
    path, name = next((engine / f, n) for f, n in CONSTRUCTORS.items() if (engine / f).exists())
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    assert found.end_lineno is not None
    return found.end_lineno - found.lineno + 1


def sizes(root: Path) -> dict[str, dict[str, dict[str, int]]]:
    """By whole and package: files that are not empty, lines, statements (`ast.stmt`) and characters."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for whole, tops in WHOLES.items():
        rows = found.setdefault(whole, {})
        for path in sorted(file for top in tops for file in _files(root / top)):
            text = path.read_text(encoding="utf-8")
            statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
            counted = (bool(text), len(text.splitlines()), statements, len(text))
            row = rows.setdefault(_package(path.relative_to(root)), dict.fromkeys(SIZES, 0))
            for size, count in zip(SIZES, counted, strict=True):
                row[size] += count
    return found


def _files(top: Path) -> list[Path]:
    return [*top.rglob("*.py")] if top.is_dir() else [top]


def _package(path: Path) -> str:
    """The folder that is counted: of two names, in the engine of three."""
    depth = 3 if path.parts[:2] == ("harness", "fsdp") else 2
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or path.name


def look(root: Path) -> dict[str, Any]:
    """Everything that is counted of one tree."""
    found: dict[str, Any] = {package: structure(root, package) for package in PACKAGES}
    return found | {"lines_of_ShardedModel_init": lines_of_init(root)}


def at(revision: str, count: Callable[[Path], dict[str, Any]] = look) -> dict[str, Any]:
    """The same of a revision, exported into a temporary folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return count(Path(folder))


def render(found: dict[str, Any]) -> str:
    """The page of the data."""
    columns = {f"{revision}, {what}": found["revisions"][revision] for revision, what in REVISIONS.items()}
    columns["as it is"] = found["now"]
    counts = ("files", "lines", "packages", "arrows", "circles", "longest_file")
    rows = [("", *columns), ("---",) * (len(columns) + 1)]
    for package in PACKAGES:
        rows += [(f"{package}: {each.replace('_', ' ')}", *_cells(columns, package, each)) for each in counts]
    init = "lines_of_ShardedModel_init"
    rows.append(("`ShardedModel.__init__`: lines", *(str(each[init]) for each in columns.values())))
    return "\n".join([HEAD, *(f"| {' | '.join(row)} |" for row in rows), "", *_size_table(found["sizes"]), ""])


def _size_table(found: dict[str, Any]) -> Iterator[str]:
    """A row a package and one a whole, each cell the revision's count and this checkout's."""
    yield from (f"Sizes of Python sources, at `{SIZED}` / in this checkout; a statement is an `ast.stmt`.", "")
    yield f"| | {' | '.join(SIZES)} |"
    yield "|---" * (len(SIZES) + 1) + "|"
    for whole in WHOLES:
        before, now = found[SIZED][whole], found["now"][whole]
        for package in sorted(before.keys() | now.keys()):
            yield _size_row(f"`{package}`", [before.get(package), now.get(package)])
        yield _size_row(f"**{whole}**", [_total(before), _total(now)])


def _size_row(name: str, pair: list[dict[str, int] | None]) -> str:
    cells = (" / ".join("-" if each is None else f"{each[size]:,}" for each in pair) for size in SIZES)
    return f"| {name} | {' | '.join(cells)} |"


def _total(rows: dict[str, dict[str, int]]) -> dict[str, int]:
    return {size: sum(row[size] for row in rows.values()) for size in SIZES}


def _cells(columns: dict[str, dict[str, Any]], package: str, count: str) -> Iterator[str]:
    for each in columns.values():
        value = each[package][count]
        if count == "circles":
            yield ", ".join(f"{one} and {other}" for one, other in value) or "none"
        elif count == "longest_file":
            yield f"{value[1]:,}: `{value[0]}`"
        else:
            yield f"{value:,}"


def main() -> None:
    """Count, write and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = {
        "command": "python benchmarks/checks/structure.py",
        "revisions": {revision: at(revision) for revision in REVISIONS},
        "now": look(ROOT),
        "sizes": {SIZED: at(SIZED, sizes), "now": sizes(ROOT)},
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(found), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    main()
