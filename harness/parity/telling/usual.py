"""How far a pair's checks are out beside what clean pairs show of each.

Some bounds are wide and some are tight: a sampled update is at half of its bound in every clean pair, a gradient's
distance in fp32 at a hundredth. `usual.json` has each check's largest share of its bound in clean pairs; an arm is far
out where its share is a large multiple of that. `benchmarks/pages/usual_ratios.py` makes the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.parity.outcome import Finding, Grade, percent

TABLE = Path(__file__).with_name("usual.json")

LEAST = 1e-3
"""Least usual share: where clean pairs agree in every bit, less than this is not far."""


class Farthest(NamedTuple):
    check: str
    ratio: float
    """Share of the bound; 1 is the bound."""
    usual: float | None
    """Multiple of the largest share in clean pairs; None if none of them showed this check."""

    @property
    def text(self) -> str:
        return self.check if self.usual is None else f"{self.check}, {percent(self.usual)} of the most in clean pairs"


@cache
def shares() -> Mapping[str, float]:
    """Largest share of its bound in clean pairs, by check."""
    found: Mapping[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))["shares"]
    return found


def farthest(evidence: Sequence[Finding]) -> Farthest | None:
    """The measured check that is farthest out for this pair; None without measurements. A failed one comes first."""
    measured = [row for row in evidence if not isinstance(row.observed, str) and not isinstance(row.allowed, str)]
    if not measured:
        return None
    known = shares()
    grades = [Grade.ok, Grade.doubt, Grade.bad]

    def beyond(row: Finding) -> tuple[int, float]:
        return grades.index(row.grade), row.ratio / max(known.get(row.check, 1.0), LEAST)

    row = max(measured, key=beyond)
    return Farthest(row.check, row.ratio, beyond(row)[1] if row.check in known else None)
