"""Who imports the engine, and what of it: this checkout beside an earlier revision.

    python benchmarks/checks/doors.py

The *door* is `harness.fsdp` itself; its torch-free declarations may be read too. Everything else of the engine is its
*inside*, which only its own tests and benchmarks import. Counted from the sources as text: imports, and strings that
are a dotted path, by which tests patch. Writes benchmarks/data/doors.json and docs/records/doors.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT, markdown_table

DATA = "doors.json"
PAGE = tables.DOCS / "records" / "doors.md"
BEFORE = "5135ba6"
ENGINE = "harness.fsdp"
DECLARATIONS = (f"{ENGINE}.vocabulary", f"{ENGINE}.options")
"""Modules without torch that anybody may read."""
OWN = (
    "tests/fsdp",
    "tests/streams",
    "benchmarks/fsdp",
    "benchmarks/gpu/products.py",
    "benchmarks/gpu/user_buffers.py",
    "tests/faults",
)
"""Tests and benchmarks of the engine's inside, and the faults that are put into it."""
MOST_NAMES = 12
"""Of the door, for everybody else."""
SOURCES = ("harness", "hydra_plugins", "run.py", "analysis", "benchmarks", "tests")
COLUMNS = (
    "package",
    "files that import it",
    "that import its inside",
    "imports",
    "of its inside",
    "names of its inside",
)
PATCHED = re.compile(rf"{re.escape(ENGINE)}(\.\w+)+")
HEAD = """# Who imports the engine

*Record. How many files outside the engine import it, through which names, and how many of its own tests import its
inside. Made by `python benchmarks/checks/doors.py`; the data are in `benchmarks/data/doors.json`.*

The *door* is the package `harness.fsdp`; its *declarations*, `vocabulary` and `options`, need no torch. All other
modules of the engine are its *inside*. Import-linter keeps `harness` out of the inside,
`tests/architecture/test_doors.py` everything else but the engine's own tests and benchmarks. A file is counted once a
row; an import of several names is as many imports; a dotted path in a string, by which a test patches, is one too.
"""


class Use(NamedTuple):
    """A name of the engine that a file imports. kind: door, declarations or inside."""

    kind: str
    name: str


def uses(source: str) -> Iterator[Use]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from filter(None, (_use(f"{node.module}.{each.name}") for each in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(None, (_use(each.name) for each in node.names))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == ENGINE:
            yield from filter(None, [_use(ast.unparse(node))])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PATCHED.fullmatch(node.value):
            yield from filter(None, [_use(node.value)])


def _use(path: str) -> Use | None:
    if not path.startswith(f"{ENGINE}.") or path.endswith("__"):
        return None
    if any(f"{path}.".startswith(f"{each}.") for each in DECLARATIONS):
        return Use("declarations", path)
    name = path.removeprefix(f"{ENGINE}.")
    is_module = "." in name or (ROOT / "harness" / "fsdp" / f"{name}.py").exists()
    is_package = (ROOT / "harness" / "fsdp" / name / "__init__.py").exists()
    return Use("inside" if is_module or is_package else "door", name if name.isidentifier() else path)


def package_of(path: str) -> str:
    """The row of a file: the engine's own by its entry in `OWN`, any other by its folder's first two parts."""
    own = next((each for each in OWN if path == each or path.startswith(f"{each}/")), None)
    parts = path.split("/")
    return own or "/".join(parts[: min(2, len(parts) - 1)]) or path


def look(root: Path) -> dict[str, dict[str, Any]]:
    """By package: its files, those that import the engine, imports and distinct names by kind."""
    found: dict[str, dict[str, Any]] = {}
    for source in SOURCES:
        top = root / source
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            relative = path.relative_to(root).as_posix()
            if not path.exists() or relative.startswith("harness/fsdp/"):
                continue
            row = found.setdefault(package_of(relative), {"files": 0, "importing": 0, "reaching_inside": 0, "uses": []})
            own = list(uses(path.read_text(encoding="utf-8")))
            row["files"] += 1
            row["importing"] += bool(own)
            row["reaching_inside"] += any(use.kind == "inside" for use in own)
            row["uses"] += own
    return {
        package: {
            "files": row["files"],
            "importing": row["importing"],
            "reaching_inside": row["reaching_inside"],
            "imports": len(row["uses"]),
            "imports_of_inside": sum(use.kind == "inside" for use in row["uses"]),
            "door": sorted({use.name for use in row["uses"] if use.kind == "door"}),
            "declarations": sorted({use.name for use in row["uses"] if use.kind == "declarations"}),
            "inside": sorted({use.name for use in row["uses"] if use.kind == "inside"}),
        }
        for package, row in sorted(found.items())
        if row["uses"]
    }


def names(found: dict[str, dict[str, Any]], kind: str, *, own: bool = False) -> list[str]:
    """Distinct names of one kind over the packages that are the engine's own, or over all others."""
    return sorted({name for package, row in found.items() if (package in OWN) == own for name in row[kind]})


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    told = [
        f"{package} imports {', '.join(row['inside'])} of {ENGINE}: take it through {ENGINE}"
        for package, row in found.items()
        if package not in OWN and row["inside"]
    ]
    used = names(found, "door")
    if len(used) > MOST_NAMES:
        told.append(f"{len(used)} names of {ENGINE} are used, and {MOST_NAMES} is the most: {', '.join(used)}")
    return told


def render(found: dict[str, Any]) -> str:
    before, now = found["before"], found["now"]
    rows = []
    for package in sorted(before.keys() | now.keys(), key=lambda each: (each in OWN, each)):
        pair = [side.get(package, {}) for side in (before, now)]
        counts = [
            [f"{each.get(key, 0):,}" for each in pair]
            for key in ("importing", "reaching_inside", "imports", "imports_of_inside")
        ]
        counts.append([f"{len(each.get('inside', ())):,}" for each in pair])
        rows.append([f"`{package}`{', its own' if package in OWN else ''}", *map(" / ".join, counts)])
    kinds = ("door", "declarations", "inside")
    parts = [
        HEAD,
        f"Cells are `{BEFORE}`, then this checkout.\n",
        markdown_table(COLUMNS, rows),
        "\nDistinct names that others than the engine's own import:\n",
        markdown_table(
            ["", f"`{BEFORE}`", "now"], [[kind, len(names(before, kind)), len(names(now, kind))] for kind in kinds]
        ),
        f"\nThe door's: {', '.join(f'`{name}`' for name in names(now, 'door'))}.\n",
    ]
    return "\n".join(parts)


def main() -> None:
    tables.parser(__doc__).parse_args()
    with tables.exported(BEFORE, *SOURCES) as folder:
        before = look(folder)
    found = {"command": "python benchmarks/checks/doors.py", "before": before, "now": look(ROOT)}
    tables.write(DATA, found)
    PAGE.write_text(render(found), encoding="utf-8")
    print(render(found))


if __name__ == "__main__":
    main()
