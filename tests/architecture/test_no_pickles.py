"""Nothing of ours is unpickled that another process sent: reading a pickle runs what it holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.mutants import each

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "harness").rglob("*.py"), ROOT / "run.py"])
OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
"""torch's collectives of objects, which are pickles."""
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
HARMLESS = {"UnpicklingError"}


def pickles(text: str) -> list[str]:
    """What in a source hands objects to other ranks, or reads or writes pickles."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names if each.name not in HARMLESS]
            found += names if (node.module or "").split(".")[0] in MODULES else []
            found += [name for name in names if OBJECTS.match(name)]
        elif isinstance(node, ast.Attribute) and OBJECTS.match(node.attr):
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OBJECTS.match(node.value):
            found.append(node.value)  # getattr(dist, "all_gather_object")
    return found


def test_no_collective_of_ours_is_pickled() -> None:
    found = {path.relative_to(ROOT).as_posix(): pickles(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(found) > 250
    assert {path: names for path, names in found.items() if names} == {}


LINES = [
    ("dist.all_gather_object(found, value)", "Ranks tell each other of their machines in objects"),
    ("torch.distributed.broadcast_object_list([value])", "A sparse buffer is broadcast as an object"),
    ("from torch.distributed import gather_object", "An object collective is imported by name"),
    ("send = getattr(dist, 'send_object_list')", "One is looked up by name"),
    ("import pickle", "A file of ours pickles by itself"),
    ("from pickle import loads", "One reads a pickle"),
]


@pytest.mark.parametrize("line", each("strangers", LINES))
def test_a_pickle_is_found(line: str) -> None:
    assert pickles(f"import torch.distributed as dist\n{line}\n")
