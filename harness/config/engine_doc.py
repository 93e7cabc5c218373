"""The guide to the engine's own knobs: one row for each option, argument and dtype, read from the engine's source.

`python -m harness.config.engine_doc` prints what is kept in docs/engine_knobs.md. The engine imports torch, the desk
does not: `harness/fsdp/options.py` and `harness/fsdp/knobs.py` are parsed, never run; every fact is a literal there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.config.doc import as_typed, sentences_of, settings

ENGINE = Path(__file__).resolve().parents[1] / "fsdp"

INTRODUCTION = """# Every knob of the engine

*Reference. Every option of the engine: what it does, what it costs, when to use it. Made by `python -m
harness.config.engine_doc > docs/engine_knobs.md` from `harness/fsdp/options.py` and `harness/fsdp/knobs.py`.*

`tests/docs/test_knobs.py` fails when this page is out of date. [engine.md](engine.md) explains what becomes of a
gradient and how the two entries differ, [configuration.md](configuration.md) lists every setting of a cell, and
[network.md](network.md) says what is asked of NCCL.

*entry*: the keyword of `fully_shard` (for plain loops) and of `ShardedModel` (for frameworks), `-` where one has none.
*setting*: what sets it in a cell. *megatron-fsdp*: the peer's name, where it has this knob; its other arguments are
refused by name ([engine.md](engine.md), last section)."""

OPTIONS_HEADING = """## Options

Fields of `harness.fsdp.Options`; both entries take them as keywords. They change what a step costs and, but for
`numerics`, none of its results."""

HEAD = "| entry | default | what it does | what it costs | when to use it | setting | megatron-fsdp |"


@dataclass(frozen=True)
class Knob:
    """A row of the guide; "" where there is none."""

    plain: str
    direct: str
    does: str
    costs: str
    use: str
    setting: str = ""
    peer: str = ""
    default: str = ""


def options() -> list[Knob]:
    """Every field of `Options`, in order."""
    source = (ENGINE / "options.py").read_text()
    sentences = sentences_of(source)["Options"]
    found = []
    for node in _class(source, "Options").body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            call, name = node.value, node.target.id
            if not isinstance(call, ast.Call):
                raise ValueError(f"harness/fsdp/options.py: {name} is given without knob(...)")
            facts = _literals(call)
            facts.setdefault("plain", name)
            facts["default"] = _default(call.args[0], facts.get("setting", ""))
            found.append(Knob(direct=name, does=sentences[name], **facts))
    return found


def arguments(table: str) -> list[Knob]:
    """The rows of `ARGUMENTS` or `DTYPES` of harness/fsdp/knobs.py."""
    for node in ast.parse((ENGINE / "knobs.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table and isinstance(node.value, ast.Tuple):
            return [Knob(**_literals(call)) for call in node.value.elts if isinstance(call, ast.Call)]
    raise ValueError(f"harness/fsdp/knobs.py has no table {table}")


def engine_guide() -> str:
    """The page, as Markdown."""
    lines = [INTRODUCTION, "", OPTIONS_HEADING, "", *_table(options())]
    lines += ["", "## Arguments", "", *_table(arguments("ARGUMENTS"))]
    lines += ["", "## Dtypes", "", "Fields of `MixedPrecisionPolicy`; what each gradient then has, station by station,"]
    lines += ["is observed in [dtypes.md](dtypes.md).", "", *_table(arguments("DTYPES"))]
    return "\n".join(lines) + "\n"


def _class(source: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)


def _literals(call: ast.Call) -> dict[str, str]:
    return {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}


def _default(node: ast.expr, setting: str) -> str:
    """A default as it is typed in Python; of a named constant, the value its setting has."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant):
        return str(node.value)
    return as_typed(settings()[setting].default)


def _table(knobs: list[Knob]) -> Iterator[str]:
    yield HEAD
    yield "|---" * HEAD.count(" | ") + "|---|"
    for knob in knobs:
        cells = [_entry(knob), _code(knob.default), knob.does, knob.costs, knob.use, _setting(knob), _code(knob.peer)]
        yield f"| {' | '.join(cells)} |"


def _entry(knob: Knob) -> str:
    if knob.plain == knob.direct:
        return _code(knob.plain)
    return f"{_code(knob.plain)} / {_code(knob.direct)}"


def _setting(knob: Knob) -> str:
    opposite, _, path = knob.setting.rpartition(" ")
    return f"{opposite} {_code(path)}".strip()


def _code(text: str) -> str:
    return f"`{text}`" if text else "-"


if __name__ == "__main__":
    print(engine_guide(), end="")
