"""Rule and request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.config.doc import as_typed
from harness.config.errors import Violation
from harness.config.schema import Config


@dataclass(frozen=True)
class Request:
    config: Config
    overrides: tuple[str, ...] = ()

    @cached_property
    def named(self) -> dict[str, str]:
        return dict(o.split("=", 1) for o in self.overrides if "=" in o)

    def value(self, path: str) -> Any:
        node: Any = self.config
        for part in path.split("."):
            node = getattr(node, part)
        return node

    def show(self, *paths: str) -> str:
        return " ".join(f"{path}={as_typed(self.value(path))}" for path in paths)


@dataclass(frozen=True)
class Rule:
    reads: tuple[str, ...]
    apply: Callable[[Request], Iterator[Violation]]


def rule(*reads: str) -> Callable[[Callable[[Request], Iterator[Violation]]], Rule]:
    return lambda function: Rule(reads, function)
