"""The group `engine`: its name, and the options of our own, which `harness.fsdp.options` declares."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TypeVar, cast

from harness.config.capabilities import EngineName as EngineName
from harness.fsdp.options import EngineOptions

T = TypeVar("T")


def thawed(frozen: type[T]) -> type[T]:
    """Mutable dataclass with the same fields, its own before inherited ones.

    OmegaConf makes frozen dataclasses read-only; the type checker still sees the frozen one.
    """
    hints = typing.get_type_hints(frozen)
    # mypy wants a dataclass here, and `type` is all that the caller can promise of what it thaws
    ordered = sorted(fields(frozen), key=lambda each: each.name not in frozen.__annotations__)  # type: ignore[arg-type]
    typed = [(each.name, hints[each.name], field(default=each.default)) for each in ordered]
    made = make_dataclass(frozen.__name__, typed, namespace={"__doc__": frozen.__doc__})
    made.__module__ = frozen.__module__
    return cast("type[T]", made)


@thawed
@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """Which engine, and what only some engines take."""

    name: EngineName = EngineName.native
    """Engine."""
    adapter: str | None = None
    """A class of your own that implements `harness.engines.protocol.Engine`, as `package.module:Class` (ext)."""
