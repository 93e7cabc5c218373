"""The guide to the engine's own knobs: one row for each option, argument and dtype, as the engine declares them.

`python -m harness.config.engine_doc` prints what is kept in docs/engine_knobs.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from harness.config.doc import meanings, sentences_of
from harness.fsdp import options as declaring
from harness.fsdp.arguments import ARGUMENTS, DTYPES, Argument
from harness.fsdp.facts import Option

INTRODUCTION = """# Every knob of the engine

*Reference. Every option of the engine: what it does, what it costs, when to use it. Made by `python -m
harness.config.engine_doc > docs/engine_knobs.md` from `harness/fsdp/options.py` and `harness/fsdp/arguments.py`.*

`tests/docs/test_knobs.py` fails when this page is out of date. [engine.md](engine.md) explains what happens to a
gradient and how the two entry points differ. [configuration.md](configuration.md) lists every setting of a run.
[network.md](network.md) describes the options of NCCL.

- *entry*: the keyword of `fully_shard` (for plain loops), and after the slash that of `ShardedModel` (for frameworks)
  if it is another one; `-` if an entry point has none.
- *takes*: the valid values. "a dimension's name; `Groups`" means that `fully_shard` takes the name and `ShardedModel`
  the object.
- *setting*: the setting of `run.py` that sets it.
- *megatron-fsdp*: the name of the same argument there. Its other arguments are refused by name
  ([engine.md](engine.md), last section)."""

OPTIONS_HEADING = """## Options

Fields of `harness.fsdp.Options`; both entry points take them as keywords. They change the cost of a step; only
`numerics` changes its results."""

HEAD = "| entry | takes | default | what it does | what it costs | when to use it | setting | megatron-fsdp |"


@dataclass(frozen=True)
class Knob:
    """A row of the guide; "" where there is none."""

    plain: str
    direct: str
    does: str
    costs: str
    use: str
    takes: str
    default: str
    setting: str = ""
    peer: str = ""


def options() -> list[Knob]:
    """Every field of `Options`, in order."""
    declared = sentences_of(inspect.getsource(declaring))
    sentences = declared["EngineOptions"] | declared["Options"]
    return [_row(option, sentences[name]) for name, option in declaring.OPTIONS.items()]


def _row(option: Option, sentence: str) -> Knob:
    facts = option.facts
    return Knob(
        plain=facts.plain or option.name,
        direct=option.name,
        does=sentence + meanings(option.kind),
        costs=facts.costs,
        use=facts.use,
        setting=facts.setting,
        peer=facts.peer,
        default=str(getattr(option.default, "name", option.default)),
        takes=option.takes,
    )


def arguments(table: tuple[Argument, ...]) -> list[Knob]:
    """The rows of `ARGUMENTS` or `DTYPES` of `harness.fsdp.arguments`."""
    return [Knob(**vars(each)) for each in table]


def engine_guide() -> str:
    """The page, as Markdown."""
    lines = [INTRODUCTION, "", OPTIONS_HEADING, "", *_table(options())]
    lines += ["", "## Arguments", "", *_table(arguments(ARGUMENTS))]
    lines += ["", "## Dtypes", "", "Fields of `MixedPrecisionPolicy`. [dtypes.md](dtypes.md) has the dtype that a"]
    lines += ["gradient was observed to have at each station.", "", *_table(arguments(DTYPES))]
    return "\n".join(lines) + "\n"


def _table(knobs: list[Knob]) -> Iterator[str]:
    yield HEAD
    yield "|---" * HEAD.count(" | ") + "|---|"
    for knob in knobs:
        cells = [
            _entry(knob),
            knob.takes,
            _code(knob.default) if knob.default else "required",
            knob.does,
            knob.costs,
            knob.use,
            _setting(knob),
            _code(knob.peer),
        ]
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
