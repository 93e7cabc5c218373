"""A docstring is read on hover, where nothing stands beside it: it must not lean on its neighbour, nor begin vaguely.

What a name and a signature say needs none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "harness"
FILES = sorted(PACKAGE.rglob("*.py"))

LEANING = re.compile(
    r"(Of|That|It|Its|They|Their|Those|Them|Both|Likewise|Also|So|There|Then|The same|The other way|This one|"
    r"These (in|are|too)|As (above|before|it|they)|Each of them|One of them|(Whether|What|Where|How) (that|it|they))\b"
)
"""First words that refer to something said before: `Of these, in the same order.`"""
VAGUE = re.compile(r"\s*(What|Whether)\b")


class Documented(NamedTuple):
    """A function, class, property, or name with a text below it."""

    name: str
    line: int
    text: str | None
    """None where there is no docstring."""


def documented(module: ast.Module) -> Iterator[Documented]:
    """Everything of a module that has a name, and every name with a text below it."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield Documented(node.name, node.lineno, ast.get_docstring(node))
        bodies = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
        for each, below in pairwise(chain(*(body for body in bodies if isinstance(body, list)))):
            if isinstance(each, ast.Assign | ast.AnnAssign) and (text := literal(below)) is not None:
                target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
                yield Documented(ast.unparse(target), each.lineno, text)


def literal(node: ast.stmt) -> str | None:
    """The text of a statement that is nothing but one."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def problems(source: str) -> list[str]:
    """What is wrong in a module, a line each."""
    module = ast.parse(source)
    found = [*documented(module), Documented("the module", 1, ast.get_docstring(module))]
    rules = (LEANING, "leans on its neighbour"), (VAGUE, "begins vaguely")
    return [
        f"line {each.line}: {each.name} {fault}: {each.text.splitlines()[0]}"
        for each in found
        for rule, fault in rules
        if each.text and rule.match(each.text)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_stand_alone_and_begin_with_their_subject(path: Path) -> None:
    assert not problems(path.read_text(encoding="utf-8"))


def arguments(source: str, entry: str) -> set[str]:
    """Names of what a function, or a class that is constructed, takes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == entry:
            return arguments("\n".join(map(ast.unparse, node.body)), "__init__")
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            return {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
    raise AssertionError(f"there is no {entry}")


@pytest.mark.parametrize(("file", "entry"), [("megatron", "fully_shard_model"), ("api", "fully_shard")])
def test_an_entry_tells_what_each_of_its_arguments_does(file: str, entry: str) -> None:
    source = (PACKAGE / "fsdp" / f"{file}.py").read_text(encoding="utf-8")
    *_, text = (each.text or "" for each in documented(ast.parse(source)) if each.name == entry)
    names = arguments(source, entry) - {"optimizer"}
    if entry == "fully_shard":  # which hands its arguments on
        names |= arguments((PACKAGE / "fsdp" / "sharding.py").read_text(encoding="utf-8"), "shard") - {"kind"}
    assert len(names) > 10
    assert not [name for name in names if not re.search(rf"^    (\w+, )?{name}(, \w+)?: ", text, re.M)]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('def f():\n    """Of these, in the same order."""', "f leans"),
        ('class A:\n    @property\n    def b(self):\n        """Whether that takes memory."""', "b leans"),
        ('class A:\n    """A."""\n    x: int\n    """Its place."""', "x leans"),
        ('@cached\ndef _f():\n    """They differ."""', "_f leans"),
        ('class A:\n    def __init__(self):\n        self.x = 1\n        """Of those."""', "self.x leans"),
        ('def _f():\n    if a:\n        x = 1\n        """The same as it is."""', "x leans"),
    ],
)
def test_a_leaning_docstring_is_found(source: str, told: str) -> None:
    assert told in " ".join(problems(source))
    assert not problems('"""M."""\nX = 1\n"""Item of these."""\ndef f(): ...')
