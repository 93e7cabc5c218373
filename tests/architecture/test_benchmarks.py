"""Every benchmark can be imported: what it takes from the package is still there."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.places import ROOT

IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_every_benchmark_imports_what_it_needs() -> None:
    paths = sorted((ROOT / "benchmarks").rglob("[!_]*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *names], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == ""
