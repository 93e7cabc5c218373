"""What is known of an option, and how its values are read: the declaration's grammar, without torch."""

from __future__ import annotations

import math
import numbers
import types
import typing
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from harness.fsdp.vocabulary import Choice

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Numbers an option takes, both ends included but where `above` or `below` says that one is not."""

    low: float
    high: float
    unit: str = ""
    """What is counted, as a plural; "" for a ratio or a seed."""
    above: bool = False
    """Whether the lower end is no value itself."""
    below: bool = False
    """Whether the upper end is no value itself."""

    def holds(self, value: float) -> bool:
        """Whether a number is one of them; NaN and infinity never are."""
        left_out = (self.above and value == self.low) or (self.below and value == self.high)
        return math.isfinite(value) and self.low <= value <= self.high and not left_out

    def nearest(self, value: float) -> float | None:
        """The end that lies nearest to a number beyond it; None where that end is no value, and for NaN."""
        if value < self.low:
            return None if self.above else self.low
        return self.high if value > self.high and not self.below else None

    def __str__(self) -> str:
        if self.above or self.below:
            low = f"above {self.low:,}" if self.above else f"at least {self.low:,}"
            ends = f"{low}, {'below' if self.below else 'up to'} {self.high:,}"
        else:
            ends = f"{self.low:,} to {self.high:,}"
        return f"{ends} {self.unit}".rstrip()


@dataclass(frozen=True)
class Facts:
    """What is known of an option beyond its type, default and sentence."""

    range: Range | None = None
    """Numbers it takes."""
    setting: str = ""
    """Path in a cell's configuration; "not group.key" where that is its opposite; "" where there is none."""
    same_bits: bool = False
    """Whether every value of it leads to the same bits."""


def option(default: T, *, range: Range | None = None, setting: str = "", same_bits: bool = False) -> T:
    """A dataclass field with its default and its `Facts`; typed as its default, as `dataclasses.field` is."""
    made: Any = field(default=default, metadata={"facts": Facts(range, setting, same_bits)})
    return cast("T", made)


@dataclass(frozen=True)
class Option:
    """One option with all that is known of it."""

    name: str
    kind: type
    """bool, int, float, or a `Choice`."""
    optional: bool
    """Whether None is a value."""
    default: Any
    facts: Facts

    @property
    def takes(self) -> str:
        """The values it takes, in words."""
        if issubclass(self.kind, Choice):
            words = ", ".join(self.kind.__members__)
        elif self.facts.range is not None:
            words = str(self.facts.range)
        else:
            words = "True, False" if self.kind is bool else self.kind.__name__
        return f"{words}, or None" if self.optional else words

    def read(self, value: Any) -> Any:
        """A value as the engine keeps it: members of a choice by themselves, everything else as it is.

        Raises:
            ValueError: it is of another type or out of range; the message says what is valid.
        """
        if issubclass(self.kind, Choice):
            return self.kind.parse(value, self.name)
        if value is None and self.optional:
            return None
        if not self._is_kind(value):
            raise ValueError(f"{self.name}={value!r} is of another type; valid are {self.takes}")
        if self.facts.range is not None and not self.facts.range.holds(value):
            raise ValueError(f"{self.name}={value!r} is out of range; valid are {self.takes}")
        return value

    def _is_kind(self, value: Any) -> bool:
        return isinstance(value, _ACCEPTS[self.kind]) and (self.kind is bool or not isinstance(value, bool))


_ACCEPTS: dict[type, type] = {bool: bool, int: numbers.Integral, float: numbers.Real}


def declared_in(declaring: type, group: str = "") -> dict[str, Option]:
    """The options a dataclass declares or inherits, by name.

    Args:
        declaring: a dataclass whose fields are made by `option`. group: of the configuration, in which each has the
            setting of its own name; "" where each says its setting.
    """
    hints = typing.get_type_hints(declaring)
    found = {}
    for each in fields(declaring):
        kinds = typing.get_args(hints[each.name]) if isinstance(hints[each.name], types.UnionType) else ()
        bare = next((kind for kind in kinds if kind is not type(None)), hints[each.name])
        facts: Facts = each.metadata["facts"]
        if group:
            facts = replace(facts, setting=f"{group}.{each.name}")
        found[each.name] = Option(each.name, bare, bool(kinds), each.default, facts)
    return found
