"""The plan of a timed run, made by rank 0 before it began, beside what was measured; see `harness.plan`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

OFF = 0.05
"""Share of the planned peak from which on a measured one leaves the plan."""


def beside(summary: Mapping[str, Any], name: str, measured: str) -> str:
    """A measured size in words, followed by the planned one where there is a plan."""
    planned = (summary.get("planned") or {}).get(name)
    return measured if planned is None else f"{measured} ({planned:,} planned)"


def leaves(summary: Mapping[str, Any]) -> str:
    """Sentence on a peak, in the middle of the ranks, that is off the plan; empty where it is not, or is not known."""
    planned = (summary.get("planned") or {}).get("peak")
    peaks = (summary.get("tensor_bytes") or {}).get("peak")
    if not planned or not peaks:
        return ""
    found = statistics.median(peaks)
    off = f"the measured peak leaves the plan by {found / planned - 1:+.1%}: {found:,.0f} bytes, {planned:,} planned"
    return off if abs(found / planned - 1) > OFF else ""
