"""A numeric setting of the typed schema: default, range and unit, declared at its field."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar, cast

from harness.fsdp.options import Range

T = TypeVar("T")

COUNT = 2**31 - 1
SEED = 2**63 - 1


def number(default: T, low: float, high: float, unit: str = "", *, above: bool = False, below: bool = False) -> T:
    """A dataclass field with its default and its range; typed as its default, as `dataclasses.field` is.

    Args: low, high: smallest and largest value. unit: plural; "" for a ratio or a seed. above, below: exclude `low`, or
    `high`.
    """
    made: Any = field(default=default, metadata={"range": Range(low, high, unit, above=above, below=below)})
    return cast("T", made)
