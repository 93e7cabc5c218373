"""A numeric setting of the typed schema: its default, its range and its unit, declared where its field is."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar, cast

from harness.fsdp.options import Range

T = TypeVar("T")

COUNT = 2**31 - 1
"""Most of what is counted one by one: steps, sequences of a batch."""
SEED = 2**63 - 1
"""Largest seed that torch's generators take."""


def number(default: T, low: float, high: float, unit: str = "", *, above: bool = False, below: bool = False) -> T:
    """A dataclass field with its default and its range; typed as its default, as `dataclasses.field` is.

    The rules, the generated guide and the messages of refusals read the range from the field's metadata.

    Args:
        low, high: the smallest and largest value. unit: what is counted, as a plural; "" for a ratio or a seed.
        above, below: `low`, or `high`, is no value itself.
    """
    made: Any = field(default=default, metadata={"range": Range(low, high, unit, above=above, below=below)})
    return cast("T", made)
