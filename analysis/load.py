"""The store as tables: one row a run, one row a run and step, one row a run and parameter.

Tables are tidy: a column is a variable, a row an observation; runs are told apart by `run`, which every table has, and
attributes of a run stand in `runs` alone. What a run did not record is missing (NaN), never zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.store import provenance, status
from harness.store.metrics import iter_metrics
from harness.store.rundir import RunDir, Store, flatten, read_summary

SETTINGS = {
    "engine": "engine.name",
    "strategy": "sharding.strategy",
    "dtype": "dtype.name",
    "numerics": "numerics.mode",
    "optimizer": "optimizer.name",
    "world_size": "mesh.world_size",
    "global_batch_size": "train.global_batch_size",
    "microbatch_size": "train.microbatch_size",
    "seq_len": "data.seq_len",
    "seed": "train.seed",
    "replicate": "train.replicate",
    "steps": "train.steps",
}
"""Columns of `runs` that come from the frozen configuration."""

RUN_COLUMNS = (
    "run",
    "path",
    "state",
    *SETTINGS,
    "microbatches",
    "final_loss",
    "accounted_bytes",
    "step_time_s",
    "sources",
    "cpu_model",
    "torch",
)

STEP_COLUMNS = (
    "run",
    "step",
    "loss",
    "grad_norm",
    "param_norm",
    "lr",
    "tokens",
    "step_time_s",
    "sent_bytes",
    "rss_bytes",
)


def runs(root: Path | str, study: str | None = None) -> pd.DataFrame:
    """One row a run: its settings, state, and what its summary says.

    Args:
        root: the store.
        study: only this study's runs; all where None.

    Returns:
        Columns `run` (`study/name`), `path`, `state`, those of `SETTINGS`, `microbatches` (k), `final_loss`,
        `accounted_bytes` (persistent, of rank 0), `step_time_s` (median), `sources` (digest of the code), `cpu_model`,
        `torch`. A run that did not end has no summary's columns.
    """
    return pd.DataFrame([_run_row(run) for run in Store(root).runs(study)], columns=list(RUN_COLUMNS))


def _run_row(run: RunDir) -> dict[str, Any]:
    config, origin, summary = flatten(run.config()), provenance.read(run.path), read_summary(run) or {}
    state = status.effective(run.path)
    row: dict[str, Any] = {
        "run": run.name,
        "path": str(run.path),
        "state": state.state.value if state else "not started",
    }
    row |= {column: config[key] for column, key in SETTINGS.items()}
    row["microbatches"] = row["global_batch_size"] // (row["microbatch_size"] * row["world_size"])
    return row | {
        "final_loss": summary.get("loss"),
        "accounted_bytes": sum((summary.get("accounted_bytes") or {}).values()) or None,
        "step_time_s": (summary.get("step_time_s") or {}).get("median"),
        "sources": origin.get("sources_digest"),
        "cpu_model": origin.get("cpu_model"),
        "torch": (origin.get("versions") or {}).get("torch"),
    }


def steps(paths: Iterable[Path | str]) -> pd.DataFrame:
    """One row a run and step, with the columns of `STEP_COLUMNS`; bytes are of rank 0.

    Args:
        paths: run directories.
    """
    rows = [_step_row(run, line) for run in map(RunDir, map(Path, paths)) for line in iter_metrics(run.metrics)]
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS))


def _step_row(run: RunDir, line: dict[str, Any]) -> dict[str, Any]:
    sent = sum(kind["bytes"] for kind in (line.get("comm") or {}).values())
    derived = {"run": run.name, "sent_bytes": sent, "rss_bytes": (line.get("memory") or {}).get("rss")}
    return {column: line.get(column) for column in STEP_COLUMNS} | derived


def gradients(arm: Path | str, control: Path | str, step: int = 1) -> pd.DataFrame:
    """One row a parameter: how far two runs' captured gradients of a step lie apart.

    Returns:
        Columns `run` (the arm's), `tensor`, `numel`, `norm`, `distance`, `scale_error`, `standard_error`; relative to
        the control. Empty where one of them did not capture the step.
    """
    from harness.parity.record import load
    from harness.parity.tiers.gradients import compare

    left, right = load(Path(arm)), load(Path(control))
    pairs = (
        compare(left.captures[step], right.captures[step]) if step in left.captures and step in right.captures else ()
    )
    rows = [(left.name, p.name, p.numel, p.norm, p.distance, p.b, p.standard_error) for p in pairs]
    return pd.DataFrame(rows, columns=["run", "tensor", "numel", "norm", "distance", "scale_error", "standard_error"])
