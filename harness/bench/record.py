"""One timed run as the store holds it: one process of one arm in one block."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.store import checksums, provenance, status
from harness.store.errors import StoreError
from harness.store.identity import repeated
from harness.store.labels import strategy_of
from harness.store.metrics import read_metrics
from harness.store.results import results
from harness.store.rundir import RunDir, read_summary
from harness.store.screen import counted
from harness.store.status import State

PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "exposed_comm_s")
STORAGE = ("persistent", "peak", "outside")
OTHERS_LIMIT_CORES = 0.25
Facts = dict[str, Any]
"""Flat and plain. Times are seconds, sizes bytes; None where not observed."""


class Process(NamedTuple):
    """One timed run.

    facts: `run`; `arm`, a hash of the configuration without the repetition, and `block`, the repetition; `engine`,
    `strategy`, `dtype`, `ranks`; `step_s` of each timed step, medians of its `parts`, `tokens` and `loss` of the last;
    `comm` by kind, `sent_bytes`, `planned` and `leaves_plan`; `load`, `others_cores`, `disturbance`; storage of the
    rank with most: `persistent_bytes`, `peak_bytes`, `outside_bytes` of the allocator.
    """

    config: Mapping[str, Any]
    origin: Mapping[str, Any]
    facts: Facts

    @property
    def median_s(self) -> float:
        return float(statistics.median(self.facts["step_s"]))


def load(path: Path) -> Process | str:
    """A timed run, or why it cannot be used: not timed, not done, or an incomplete or damaged record."""
    run = RunDir(path)
    try:
        state = status.effective(path)
        if state is None:
            return "never started"
        if state.state is not State.done:
            return f"{state.state.value}: {state.reason}"
        if damaged := checksums.damage(path, *checksums.TOLD):
            return f"done, but its record is damaged: {'; '.join(damaged.values())}"
        if run.setting("measure.mode") != "bench":
            return "not timed: measure.mode=record"
        config, summary, lines = run.config(), read_summary(run), read_metrics(run.metrics)
        if summary is None or len(lines) != config["train"]["steps"] or summary.get("load") is None:
            return "done, but its record is not whole"
        return Process(config, provenance.read(path), _facts(run, config, summary, lines))
    except StoreError as error:
        return str(error)
    except (LookupError, TypeError, ValueError) as error:
        return f"done, but its record is damaged: {error!r}"


def _facts(
    run: RunDir, config: Mapping[str, Any], summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Facts:
    timed, found = lines[config["measure"]["warmup_steps"] :], results(run)
    ranks, busy = config["mesh"]["world_size"], summary["load"]
    load = max(busy["at_start"], busy["at_end"])
    disturbed = [f"load average {load:.1f} with {counted(ranks, 'rank')}"] * (load > ranks + 1)
    if busy["others_cores"] > OTHERS_LIMIT_CORES:
        disturbed.append(f"other programs kept {busy['others_cores']:.2f} cores busy")
    followed = summary.get("tensor_bytes") or {}
    return {
        "run": run.name,
        "arm": hashlib.sha256(repeated(config).encode()).hexdigest()[:8],
        "block": config["train"]["replicate"],
        "engine": config["engine"]["name"],
        "strategy": strategy_of(config),
        "dtype": config["dtype"]["name"],
        "ranks": ranks,
        "step_s": [float(line["step_time_s"]) for line in timed],
        "parts": {part: median([line["time"].get(part) for line in timed]) for part in PARTS},
        "tokens": int(timed[-1]["tokens"]),
        "loss": found["final_loss"],
        "comm": timed[-1]["comm"],
        **{f"{each}_bytes": max(followed[each]) if each in followed else None for each in STORAGE},
        **{name: found[name] for name in ("accounted_bytes", "sent_bytes", "leaves_plan")},
        "rss_bytes": max(line["memory"]["rss"] for line in timed),
        "planned": summary.get("planned") or {},
        "load": load,
        "others_cores": busy["others_cores"],
        "disturbance": ", ".join(disturbed),
    }


def median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if len(seen) == len(values) else None
