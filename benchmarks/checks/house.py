"""The structure in numbers, of this checkout beside a revision: files, lines, rooms, arrows. Writes data/house.json.

    python benchmarks/checks/house.py [--before REVISION]

A *room* of a package is a folder or a file directly in it; an *arrow* is a pair of rooms of which one imports the
other; arrows both ways are a *circle*. Counted from the sources as text, for `harness` and for the engine,
`harness/fsdp`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parents[1] / "data" / "house.json"
BEFORE = "9fd760c"
"""The last revision before the files were moved into rooms."""
PACKAGES = ("harness", "harness.fsdp")


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


def room(module: str, package: str) -> str:
    """The room of a module: its first part below the package."""
    return module.removeprefix(f"{package}.").partition(".")[0]


def arrows(found: dict[str, Path], package: str) -> set[tuple[str, str]]:
    """Pairs of rooms: the importing one and the imported one."""
    pairs = {
        (room(module, package), room(name, package))
        for module, path in found.items()
        for name in imported(path)
        if module != package and name.startswith(f"{package}.")
    }
    return {(one, other) for one, other in pairs if one != other}


def structure(root: Path, package: str) -> dict[str, Any]:
    """Counts of one package."""
    found = modules(root, package)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in found.items()}
    rooms = {room(name, package) for name in found if name != package}
    pairs = {pair for pair in arrows(found, package) if set(pair) <= rooms}
    longest = max(lines, key=lambda name: lines[name])
    return {
        "files": len([count for count in lines.values() if count]),
        "lines": sum(lines.values()),
        "rooms": len(rooms),
        "arrows": len(pairs),
        "circles": sorted([list(pair) for pair in pairs if pair[::-1] in pairs and pair[0] < pair[1]]),
        "longest_file": [longest, lines[longest]],
    }


def lines_of_init(root: Path) -> int:
    """Lines of the body of `ShardedModel.__init__`, signature left out."""
    tree = ast.parse((root / "harness" / "fsdp" / "model.py").read_text(encoding="utf-8"))
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ShardedModel")
    (init,) = (node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert init.end_lineno is not None
    return init.end_lineno - init.body[0].lineno + 1


def look(root: Path) -> dict[str, Any]:
    """Everything that is counted of one tree."""
    found: dict[str, Any] = {package: structure(root, package) for package in PACKAGES}
    return found | {"lines_of_ShardedModel_init": lines_of_init(root)}


def at(revision: str) -> dict[str, Any]:
    """The same of a revision, exported into a temporary folder."""
    archive = subprocess.run(["git", "archive", revision, "harness"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return look(Path(folder))


def main() -> None:
    """Count, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="REVISION", help="what to compare with")
    before = parser.parse_args().before
    found = {"command": "python benchmarks/checks/house.py", "before": {"revision": before, **at(before)}}
    found["now"] = look(ROOT)
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
