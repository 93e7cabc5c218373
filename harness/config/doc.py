"""Path, type, range, default and sentence of every setting, read from the schema's own source.

Error messages quote the sentences, and docs/configuration.md has them all (`benchmarks/pages/settings_page.py`).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from harness.config import groups as sections, schema
from harness.config.groups import Only
from harness.fsdp import options
from harness.fsdp.options import Range


@dataclass(frozen=True)
class Setting:
    path: str
    type: Any
    """Annotation, without an optional's `None`."""
    optional: bool
    default: Any
    """Value in the schema; `conf/` may hold another."""
    sentence: str
    range: Range | None = None
    """Range and unit of a number, or of each in a list; None of other types."""
    only: tuple[Only, ...] = ()
    """Conditions under which it has an effect."""

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.type.__members__) if isinstance(self.type, type) and issubclass(self.type, Enum) else ()

    @property
    def expects(self) -> str:
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]
        return words + (f", {self.valid}" if self.range else ", or null" if self.optional else "")

    @property
    def valid(self) -> str:
        """Range in words: `1 to 64 ranks, or null`; "" without one."""
        each = "each " if typing.get_origin(self.type) is list else ""
        return f"{each}{self.range}{', or null' if self.optional else ''}" if self.range else ""


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers, like [1,10]",
    list[float]: "a list of numbers, like [0.9,0.95]",
    list[str]: "a list of texts",
    dict[str, float]: "pairs, like {loss: 0.001}",
    dict[str, str]: "pairs, like {name: value}",
    dict[str, list[str]]: "axes, like {key: [value, value]}",
}


@functools.cache
def settings() -> dict[str, Setting]:
    return {setting.path: setting for setting in _walk(schema.Config, "")}


def unknown_words(config: Mapping[str, Any]) -> list[str]:
    return [
        f"{path}={config[path]}, which is none of {', '.join(choices)}"
        for path, setting in settings().items()
        if (choices := setting.choices) and config.get(path) is not None and config[path] not in choices
    ]


def unknown_settings(config: Mapping[str, Any]) -> list[str]:
    inside = tuple(f"{path}." for path in tables())
    return [path for path in config if path not in settings() and not path.startswith(inside)]


@functools.cache
def tables() -> tuple[str, ...]:
    """Settings whose keys are the user's own."""
    return tuple(path for path, setting in settings().items() if typing.get_origin(setting.type) is dict)


@functools.cache
def groups() -> dict[str, str]:
    hints = typing.get_type_hints(schema.Config)
    return {name: inspect.getdoc(hint) or "" for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def _walk(cls: type, prefix: str) -> Iterator[Setting]:
    hints, declared = typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, kind = prefix + field.name, declared[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{path}.")
            continue
        optional = type(None) in typing.get_args(kind)
        bare = typing.get_args(kind)[0] if optional else kind
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        sentence = _sentences()[cls.__name__].get(field.name) or sentences_of_options()[path]
        more = [*_metadata(hints[field.name])]
        numbers = next((each for each in more if isinstance(each, Range)), None)
        only = tuple(each for each in more if isinstance(each, Only))
        yield Setting(path, bare, optional, made, sentence, numbers, only)


def _metadata(kind: Any) -> Iterator[Any]:
    """Metadata of an annotation, at any depth."""
    yield from getattr(kind, "__metadata__", ())
    for inner in typing.get_args(kind):
        yield from _metadata(inner)


@functools.cache
def _sentences() -> dict[str, dict[str, str]]:
    return sentences_of(inspect.getsource(schema)) | sentences_of(inspect.getsource(sections))


@functools.cache
def sentences_of_options() -> dict[str, str]:
    """Setting -> sentence of the engine's option, with None written as null."""
    declared = sentences_of(inspect.getsource(options))
    sentences = declared["EngineOptions"] | declared["Options"]
    return {
        option.setting: re.sub(r"\bNone\b", "null", sentences[name])
        for name, option in options.OPTIONS.items()
        if option.setting
    }


def sentences_of(source: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        of_class = found.setdefault(node.name, {})
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                literal = below.value if isinstance(below, ast.Expr) else None
                text = literal.value if isinstance(literal, ast.Constant) else ""
                of_class[field.target.id] = " ".join(str(text).split())
    return found


def as_typed(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(as_typed(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_typed(v)}" for k, v in value.items()) + "}"
    return str(value)


def plain_of(value: object) -> Any:
    """Plain values of a configuration, or of a part of it."""
    if dataclasses.is_dataclass(value):
        return {each.name: plain_of(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, list):
        return [plain_of(inner) for inner in value]
    if isinstance(value, dict):
        return {key: plain_of(inner) for key, inner in value.items()}
    return value.name if isinstance(value, Enum) else value
