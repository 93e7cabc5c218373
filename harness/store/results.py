"""Results of a run for every reader: step time, speeds, memory and traffic, and what its plan said of them.

Step time (ms/step) is the median of a run's steps without the first, which warms up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.store.metrics import numbers, tail
from harness.store.rundir import RunDir, read_summary

OFF = 0.05
"""Share of the planned peak from which on a measured one leaves the plan."""


def results(run: RunDir) -> dict[str, Any]:
    """Results so far by name; None where not recorded, or none yet.

    `step_time_s` and `exposed_comm_s` are medians, and rates those at the median step. `peak_bytes` is the largest
    tensor storage within a step: of any rank under measure=bench, else of rank 0 in the newest steps. Other bytes are
    rank 0's: `accounted_bytes` the engine's between steps, `rss_bytes` the process's, `sent_bytes` of the last step.
    `planned_*` and `leaves_plan` are the plan's. Raises `StoreError`: summary or record are damaged.
    """
    lines, summary = tail(run.metrics), read_summary(run) or {}
    last: Mapping[str, Any] = lines[-1] if lines else {}
    seconds = median_step_time(lines, summary)
    planned, sent = summary.get("planned") or {}, last.get("comm")
    exposed, held_out = numbers(lines, "time/exposed_comm_s"), numbers(lines, "validation/loss")
    held_out += [float(each["loss"]) for each in [summary.get("validation")] if each]
    return {
        "steps_done": last.get("step", 0),
        "final_loss": last.get("loss"),
        "held_out_loss": held_out[-1] if held_out else None,
        "final_grad_norm": last.get("grad_norm"),
        "step_time_s": seconds,
        "exposed_comm_s": statistics.median(exposed) if exposed else None,
        **rates(last, seconds),
        "accounted_bytes": sum((summary.get("accounted_bytes") or {}).values()) or None,
        "peak_bytes": _peak(lines, summary),
        "rss_bytes": max(numbers(lines, "memory/rss"), default=None),
        "sent_bytes": None if sent is None else sum(kind["bytes"] for kind in sent.values()),
        **{f"planned_{name}_bytes": planned.get(name) for name in ("kept", "peak", "sent")},
        "leaves_plan": leaves_plan(summary),
        "wall_s": summary.get("wall_s"),
    }


def rates(last: Mapping[str, Any], seconds: float | None) -> dict[str, float | None]:
    """`tokens_per_s`, `tflops_per_rank` and `mfu` at the median step time; None where not recorded.

    Args: last: a run's newest record.
    """
    share = (last.get("step_time_s") or 0.0) / seconds if seconds else 0.0
    arithmetic = {name: (last.get(name) or 0.0) * share or None for name in ("tflops_per_rank", "mfu")}
    return {"tokens_per_s": (last.get("tokens") or 0) / seconds or None if seconds else None, **arithmetic}


def median_step_time(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float | None:
    """Seconds, from the summary of an ended run, else from its newest steps; None without steps."""
    times = numbers(lines, "step_time_s")
    if not times:
        return None
    if summary.get("step") == lines[-1]["step"] and (known := (summary.get("step_time_s") or {}).get("median")):
        return float(known)
    return statistics.median(times[1:] if numbers(lines[:1], "step") == [1] and len(times) > 1 else times)


def _peak(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float | None:
    if followed := summary.get("tensor_bytes"):
        return float(max(followed["peak"]))
    return max(numbers(lines, "memory/peak_tensor_bytes") or numbers(lines, "memory/allocated"), default=None)


def leaves_plan(summary: Mapping[str, Any]) -> str:
    """Sentence on a peak, in the middle of the ranks, that is off the plan; empty where it is not, or is not known."""
    planned = (summary.get("planned") or {}).get("peak")
    peaks = (summary.get("tensor_bytes") or {}).get("peak")
    if not planned or not peaks:
        return ""
    found = statistics.median(peaks)
    off = f"the measured peak leaves the plan by {found / planned - 1:+.1%}: {found:,.0f} bytes, {planned:,} planned"
    return off if abs(found / planned - 1) > OFF else ""
