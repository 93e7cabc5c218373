"""The structure in numbers, of this checkout beside earlier revisions as they were counted: files, lines, arrows.

    python benchmarks/checks/structure.py

A *package* is a folder or a file directly in a package; an *arrow* is a pair of packages of which one imports the
other; arrows both ways are a *circle*. Counted from the sources as text, for `harness` and for the engine,
`harness/fsdp`; and the size of product, tests and benchmarks, package by package. Writes
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


def lines_of_init(root: Path) -> int:
    """Lines of `shard`, which constructs a sharded model, signature included."""
    nodes = ast.walk(ast.parse((root / "harness" / "fsdp" / "sharding.py").read_text(encoding="utf-8")))
    found = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "shard")
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


def look(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {package: structure(root, package) for package in PACKAGES}
    return found | {"lines_of_ShardedModel_init": lines_of_init(root)}


def render(found: dict[str, Any]) -> str:
    columns = {f"{revision}, {what}": found["revisions"][revision] for revision, what in REVISIONS.items()}
    columns["as it is"] = found["now"]
    counts = ("files", "lines", "packages", "arrows", "circles", "longest_file")
    rows = [
        (f"{package}: {each.replace('_', ' ')}", *(_cell(column[package][each], each) for column in columns.values()))
        for package in PACKAGES
        for each in counts
    ]
    init = "lines_of_ShardedModel_init"
    rows.append(("`ShardedModel.__init__`: lines", *(str(each[init]) for each in columns.values())))
    parts = {"packages": markdown_table(["", *columns], rows), "sizes": _size_table(found["sizes"])}
    return tables.made(PAGE, parts)


def _cell(value: Any, count: str) -> str:
    if count == "circles":
        return ", ".join(f"{one} and {other}" for one, other in value) or "none"
    return f"{value[1]:,}: `{value[0]}`" if count == "longest_file" else f"{value:,}"


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
    found["now"], found["sizes"]["now"] = look(ROOT), sizes(ROOT)
    tables.write(DATA, found)
    PAGE.write_text(render(found), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    main()
