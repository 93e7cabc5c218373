"""The structure in numbers: circles of packages, and sizes beside an earlier revision's.

    python benchmarks/checks/structure.py

A *package* is a folder or a file directly in a package; two that import each other are a *circle*. Counted from the
sources as text. Writes the size of product, tests and benchmarks, package by package, into
benchmarks/data/structure.json and docs/records/structure.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT, markdown_table

DATA = "structure.json"
PAGE = tables.DOCS / "records" / "structure.md"
SIZED = "5135ba6"
"""The revision whose sizes stand beside those of this checkout."""
WHOLES = {"product": ("harness", "hydra_plugins", "run.py"), "tests": ("tests",), "benchmarks": ("benchmarks",)}
SIZES = ("files", "lines", "statements", "characters")
PACKAGES = ("harness", "harness.fsdp")


def modules(root: Path, package: str) -> dict[str, Path]:
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


def circles(root: Path, package: str) -> list[tuple[str, str]]:
    pairs = {
        (package_of(module, package), package_of(name, package))
        for module, path in modules(root, package).items()
        for name in imported(path)
        if module != package and name.startswith(f"{package}.")
    }
    return sorted(pair for pair in pairs if pair[::-1] in pairs and pair[0] < pair[1])


def sizes(root: Path) -> dict[str, dict[str, dict[str, int]]]:
    """By whole and package: files that are not empty, lines, statements (`ast.stmt`) and characters."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for whole, tops in WHOLES.items():
        rows = found.setdefault(whole, {})
        for path in sorted(file for top in tops for file in _files(root / top)):
            text = path.read_text(encoding="utf-8")
            statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
            counted = (bool(text), len(text.splitlines()), statements, len(text))
            row = rows.setdefault(folder_of(path.relative_to(root)), dict.fromkeys(SIZES, 0))
            for size, count in zip(SIZES, counted, strict=True):
                row[size] += count
    return found


def _files(top: Path) -> list[Path]:
    return [*top.rglob("*.py")] if top.is_dir() else [top]


def folder_of(path: Path) -> str:
    """The folder that is counted: of two names, in the engine of three."""
    depth = 3 if path.parts[:2] == ("harness", "fsdp") else 2
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)]) or path.name


def render(found: dict[str, Any]) -> str:
    return tables.made(PAGE, {"sizes": _size_table(found["sizes"])})


def _size_table(found: dict[str, Any]) -> str:
    """A row a package and one a whole, each cell the revision's count and this checkout's."""
    rows = []
    for whole in WHOLES:
        sides = [found[SIZED][whole], found["now"][whole]]
        packages = sorted(sides[0].keys() | sides[1].keys())
        rows += [[f"`{each}`", *_size_cells([side.get(each) for side in sides])] for each in packages]
        totals = [{size: sum(row[size] for row in side.values()) for size in SIZES} for side in sides]
        rows.append([f"**{whole}**", *_size_cells(totals)])
    return markdown_table(["", *SIZES], rows)


def _size_cells(pair: Sequence[dict[str, int] | None]) -> list[str]:
    return [" / ".join("-" if each is None else f"{each[size]:,}" for each in pair) for size in SIZES]


def main() -> None:
    tables.parser(__doc__).parse_args()
    found = tables.read(DATA)
    found["sizes"]["now"] = sizes(ROOT)
    tables.write(DATA, found)
    PAGE.write_text(render(found), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    main()
