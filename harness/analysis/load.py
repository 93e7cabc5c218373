"""The store as tidy tables: one row a run, a run and step, or a run and parameter.

Runs are identified by `run`, a column of every table; attributes of a run stand in `runs` alone. Missing records are
NaN, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from harness.store import checksums, provenance, status
from harness.store.errors import StoreError
from harness.store.labels import labels
from harness.store.metrics import iter_metrics, tail
from harness.store.results import results
from harness.store.rundir import RunDir, Store, flatten, read_summary

SETTINGS = {
    "model": "model.name",
    "engine": "engine.name",
    "strategy": "sharding.strategy",
    "outer": "sharding.outer",
    "dtype": "dtype.name",
    "numerics": "numerics.mode",
    "nccl_ub": "nccl_ub.mode",
    "sharp": "sharp.group",
    "optimizer": "optimizer.name",
    "lr": "optimizer.lr",
    "fault": "fault.name",
    "data": "data.kind",
    "device": "cluster.device",
    "world_size": "mesh.world_size",
    "dp_outer": "mesh.dp_outer",
    "tp": "mesh.tp",
    "global_batch_size": "train.global_batch_size",
    "microbatch_size": "train.microbatch_size",
    "seq_len": "data.seq_len",
    "seed": "train.seed",
    "replicate": "train.replicate",
    "steps": "train.steps",
}
RESULTS = (
    *("microbatches", "steps_done", "final_loss", "held_out_loss", "final_grad_norm"),
    *("step_time_s", "exposed_comm_s", "tokens_per_s", "tflops_per_rank", "mfu"),
    *("accounted_bytes", "peak_bytes", "rss_bytes", "sent_bytes"),
    *("planned_kept_bytes", "planned_peak_bytes", "planned_sent_bytes", "leaves_plan", "wall_s"),
)
RUN_COLUMNS = (
    *("run", "study", "label", "path", "state", "reason"),
    *SETTINGS,
    "mesh",
    *RESULTS,
    *("sources", "commit", "cpu_model", "torch"),
)
STEP_COLUMNS = (
    *("run", "step", "loss", "grad_norm", "param_norm", "lr", "tokens"),
    *("step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "exposed_comm_s"),
    *("sent_bytes", "rss_bytes"),
)
DAMAGED = "damaged"


def runs(root: Path | str, study: str | None = None) -> pd.DataFrame:
    """One row a run, with the columns `RUN_COLUMNS`; a thousand runs take two seconds.

    `run` is `study/name`, `mesh` the ranks by axis, `microbatches` k; results are those of
    `harness.store.results.results`.
    """
    store = Store(root)
    rows = [_run_row(run) for run in store.runs(study)]
    for name in dict.fromkeys(row["study"] for row, _ in rows):
        mine = {row["path"]: (row, config) for row, config in rows if row["study"] == name}
        known = {path: config for path, (_, config) in mine.items() if config and "watched.version" not in config}
        named = labels(known) if len(known) > 1 or len(mine) == 1 else {}
        for path, (row, _) in mine.items():
            row["label"] = named.get(path, Path(path).name)
    return pd.DataFrame([row for row, _ in rows], columns=list(RUN_COLUMNS))


def _run_row(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    row: dict[str, Any] = {"run": run.name, "study": run.path.parent.name, "path": str(run.path)}
    config: dict[str, Any] = {}
    try:
        config = flatten(run.config())
        state = status.effective(run.path)
        row |= {"state": state.state.value, "reason": state.reason} if state else {"state": "not started", "reason": ""}
        row |= {column: config.get(key) for column, key in SETTINGS.items()}
        row |= {"mesh": mesh_of(config), "microbatches": _microbatches(config)}
        checksums.demand(run.path, *checksums.TOLD)
        origin = provenance.read(run.path)
        row |= {"sources": origin.get("sources_digest"), "commit": (origin.get("git") or {}).get("sha")}
        row |= {"cpu_model": origin.get("cpu_model"), "torch": (origin.get("versions") or {}).get("torch")}
        row |= results(run)
    except StoreError as error:
        row |= {"state": DAMAGED, "reason": str(error)}
    return row, config


def _microbatches(config: Mapping[str, Any]) -> int | None:
    try:
        ranks = config["mesh.world_size"] // config.get("mesh.tp", 1)
        return int(config["train.global_batch_size"] // max(1, config["train.microbatch_size"] * ranks))
    except (KeyError, TypeError):
        return None


def mesh_of(config: Mapping[str, Any]) -> str:
    """Ranks by axis, such as `4`, `2 x 2 outer` or `2 x 2 tp`."""
    outer, tp = config.get("mesh.dp_outer", 1), config.get("mesh.tp", 1)
    inner = config.get("mesh.world_size", 0) // (outer * tp)
    axes = [f"{outer} outer"] * (outer > 1) + [f"{tp} tp"] * (tp > 1)
    return " x ".join([str(inner), *axes])


def steps(paths: Iterable[Path | str]) -> pd.DataFrame:
    """One row a run and step, with the columns `STEP_COLUMNS`; times and bytes are rank 0's. Damaged records are left
    out."""
    rows = _rows(paths, lambda run: [_step_row(run, line) for line in iter_metrics(run.metrics)])
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS))


def _rows(paths: Iterable[Path | str], of: Callable[[RunDir], list[Any]]) -> list[Any]:
    found = []
    for path in paths:
        try:
            checksums.demand(Path(path), *checksums.TOLD)
            found += of(RunDir(Path(path)))
        except StoreError:
            continue
    return found


def _step_row(run: RunDir, line: Mapping[str, Any]) -> dict[str, Any]:
    sent = sum(kind["bytes"] for kind in (line.get("comm") or {}).values())
    derived = {"run": run.name, "sent_bytes": sent, "rss_bytes": (line.get("memory") or {}).get("rss")}
    return {**{column: line.get(column) for column in STEP_COLUMNS}, **(line.get("time") or {}), **derived}


def traffic(paths: Iterable[Path | str]) -> pd.DataFrame:
    """One row a run and kind of collective: `run`, `kind`, `count` and `bytes` that rank 0 sent in the last step."""
    return pd.DataFrame(_rows(paths, _traffic), columns=["run", "kind", "count", "bytes"])


def _traffic(run: RunDir) -> list[tuple[str, str, int, int]]:
    kinds = {kind: row for line in tail(run.metrics)[-1:] for kind, row in (line.get("comm") or {}).items()}
    return [(run.name, kind, row["count"], row["bytes"]) for kind, row in kinds.items()]


def memory(paths: Iterable[Path | str]) -> pd.DataFrame:
    """One row a run and role: `run`, `role`, `bytes` of rank 0's engine between steps."""
    return pd.DataFrame(_rows(paths, _memory), columns=["run", "role", "bytes"])


def _memory(run: RunDir) -> list[tuple[str, str, int]]:
    kept = (read_summary(run) or {}).get("accounted_bytes") or {}
    return [(run.name, role.replace("_", " "), num_bytes) for role, num_bytes in kept.items()]
