"""What a rule is and what it sees."""

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
    """A typed configuration with the overrides that led to it."""

    config: Config
    overrides: tuple[str, ...] = ()

    @cached_property
    def named(self) -> dict[str, str]:
        """Value by key as typed, for every override; a group's option is keyed by the group."""
        return dict(o.split("=", 1) for o in self.overrides if "=" in o)

    def value(self, path: str) -> Any:
        """Value of a setting by dotted path."""
        node: Any = self.config
        for part in path.split("."):
            node = getattr(node, part)
        return node

    def show(self, *paths: str) -> str:
        """Settings as they would be typed: `train.steps=0`, joined by spaces."""
        return " ".join(f"{path}={as_typed(self.value(path))}" for path in paths)


@dataclass(frozen=True)
class Rule:
    """One condition: what it reads, and the violations it finds in a request."""

    reads: tuple[str, ...]
    """Settings that must be in range before the rule makes sense."""
    apply: Callable[[Request], Iterator[Violation]]


def rule(*reads: str) -> Callable[[Callable[[Request], Iterator[Violation]]], Rule]:
    """Make a function of a request a Rule that reads these settings."""
    return lambda function: Rule(reads, function)
