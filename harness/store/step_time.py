"""Step time (ms/step) everywhere: the median of a run's steps without the first, which warms up."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
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
