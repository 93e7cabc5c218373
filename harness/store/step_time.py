"""Step time (ms/step) everywhere: the median of a run's steps without the first, which warms up.

Beside it what readers say of a run's memory and traffic, and how far these leave its plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.store.metrics import last_numbers
from harness.store.rundir import RunDir, read_summary

NEWEST = 50


def median_step_time(run: RunDir) -> float | None:
    """Seconds, from the summary of an ended run, else from its newest steps; None without steps.

    Raises `StoreError`: summary or record are damaged.
    """
    newest = last_numbers(run.metrics, ("step", "step_time_s"), NEWEST)
    if not newest["step_time_s"]:
        return None
    summary = read_summary(run) or {}
    if summary.get("step") == newest["step"][-1] and (known := (summary.get("step_time_s") or {}).get("median")):
        return float(known)
    times = newest["step_time_s"]
    return statistics.median(times[1:] if newest["step"][0] == 1 and len(times) > 1 else times)


def rates(last: Mapping[str, Any], seconds: float | None) -> dict[str, float]:
    """tokens (a second), tflops (TFLOP/s of a rank) and mfu (per cent), if recorded, at the median step time.

    Args: last: a run's newest record. seconds: `median_step_time`.
    """
    if not seconds:
        return {}
    share = (last.get("step_time_s") or 0.0) / seconds
    each = {
        "tokens": last["tokens"] / seconds if last.get("tokens") else None,
        "tflops": last["tflops_per_rank"] * share if last.get("tflops_per_rank") else None,
        "mfu": 100 * last["mfu"] * share if last.get("mfu") else None,
    }
    return {name: value for name, value in each.items() if value is not None}


OFF = 0.05
"""Share of the planned peak from which on a measured one leaves the plan."""


def beside_plan(summary: Mapping[str, Any], name: str, measured: str) -> str:
    """A measured size in words, followed by the planned one where there is a plan."""
    planned = (summary.get("planned") or {}).get(name)
    return measured if planned is None else f"{measured} ({planned:,} planned)"


def leaves_plan(summary: Mapping[str, Any]) -> str:
    """Sentence on a peak, in the middle of the ranks, that is off the plan; empty where it is not, or is not known."""
    planned = (summary.get("planned") or {}).get("peak")
    peaks = (summary.get("tensor_bytes") or {}).get("peak")
    if not planned or not peaks:
        return ""
    found = statistics.median(peaks)
    off = f"the measured peak leaves the plan by {found / planned - 1:+.1%}: {found:,.0f} bytes, {planned:,} planned"
    return off if abs(found / planned - 1) > OFF else ""


MEMORY = ("memory/peak_tensor_bytes", "memory/allocated", "memory/rss")


def peak_bytes(summary: Mapping[str, Any], newest: Mapping[str, Sequence[float]]) -> float | None:
    """Largest tensor storage within a step: of any rank under measure=bench, else of rank 0's newest steps."""
    if followed := summary.get("tensor_bytes"):
        return float(max(followed["peak"]))
    return max(newest["memory/peak_tensor_bytes"] or newest["memory/allocated"], default=None)


def sent_bytes(line: Mapping[str, Any]) -> int | None:
    """Bytes that rank 0 sent in a step; None where they were not counted."""
    comm = line.get("comm")
    return None if comm is None else sum(kind["bytes"] for kind in comm.values())
