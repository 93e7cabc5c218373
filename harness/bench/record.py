"""One timed run as the store holds it: one process of one arm in one block."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.store import checksums, provenance, status
from harness.store.identity import repeated
from harness.store.metrics import read_metrics
from harness.store.reading import checked
from harness.store.results import leaves_plan
from harness.store.rundir import CONFIG, RunDir, read_summary
from harness.store.screen import counted
from harness.store.shapes import TIMED
from harness.store.status import State

PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "exposed_comm_s")

OTHERS_LIMIT_CORES = 0.25


@dataclass(frozen=True)
class Process:
    """One timed run. Times are seconds, sizes bytes; None where not observed."""

    run: str
    arm: str
    """Hash of the configuration without the repetition: the same for all blocks of an arm."""
    block: int
    config: Mapping[str, Any]
    ended: str
    """UTC, ISO 8601."""
    step_s: tuple[float, ...]
    parts: Mapping[str, float | None]
    tokens: int
    loss: float
    """Loss of the last step, in nats a token."""
    comm: Mapping[str, Mapping[str, int]]
    """Collectives that rank 0 sent in the last step, by kind: count and bytes."""
    persistent_bytes: int | None
    """Tensor storage between steps, of the rank with most."""
    peak_bytes: int | None
    """Largest tensor storage within a settled step, of the rank with most."""
    growth_bytes: int | None
    outside_bytes: int | None
    """Device memory outside the allocator (NCCL buffers, work spaces), of the rank with most. None on CPU and shared
    devices."""
    accounted_bytes: int
    planned: Mapping[str, int | None]
    """Bytes kept, at the peak and sent, by the plan; empty without one."""
    leaves_plan: str
    rss_bytes: int
    load: float
    others_cores: float
    origin: Mapping[str, Any]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def sent_bytes(self) -> int:
        return sum(kind["bytes"] for kind in self.comm.values())

    @property
    def disturbance(self) -> str:
        ranks, found = int(self.config["mesh"]["world_size"]), []
        if self.load > ranks + 1:
            found.append(f"load average {self.load:.1f} with {counted(ranks, 'rank')}")
        if self.others_cores > OTHERS_LIMIT_CORES:
            found.append(f"other programs kept {self.others_cores:.2f} cores busy")
        return ", ".join(found)


def load(path: Path) -> Process | str:
    """A timed run, or why it cannot be used: not done, or an incomplete record.

    Raises `StoreError`: the run's directory is malformed.
    """
    run = RunDir(path)
    state = status.effective(path)
    if state is None or state.state is not State.done:
        return "never started" if state is None else f"{state.state.value}: {state.reason}"
    if damaged := checksums.damage(path, *checksums.TOLD):
        return f"done, but its record is damaged: {'; '.join(damaged.values())}"
    config = checked(run.config(), TIMED, str(run.path / CONFIG))
    summary, lines = read_summary(run), read_metrics(run.metrics)
    if summary is None or len(lines) != config["train"]["steps"] or summary.get("load") is None:
        return "done, but its record is not whole"
    try:
        return _process(run, state.updated, config, summary, lines)
    except (LookupError, TypeError, ValueError) as error:
        return f"done, but its record is damaged: {error!r}"


def _process(
    run: RunDir, ended: str, config: Mapping[str, Any], summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Process:
    timed = lines[config["measure"]["warmup_steps"] :]
    return Process(
        run=run.name,
        arm=arm_of(config),
        block=config["train"]["replicate"],
        config=config,
        ended=ended,
        step_s=tuple(_number(line["step_time_s"]) for line in timed),
        parts={part: median([line["time"].get(part) for line in timed]) for part in PARTS},
        tokens=_number(timed[-1]["tokens"]),
        loss=timed[-1]["loss"],
        comm=timed[-1]["comm"],
        **_storage(summary),
        accounted_bytes=sum(summary["accounted_bytes"].values()),
        planned=summary.get("planned") or {},
        leaves_plan=leaves_plan(summary),
        rss_bytes=max(line["memory"]["rss"] for line in timed),
        load=max(summary["load"]["at_start"], summary["load"]["at_end"]),
        others_cores=summary["load"]["others_cores"],
        origin=provenance.read(run.path),
    )


def _number(value: Any) -> Any:
    if value is None:
        raise ValueError("a step has no time, or no tokens")
    return value


def _storage(summary: Mapping[str, Any]) -> dict[str, int | None]:
    followed = summary.get("tensor_bytes") or {}
    return {
        f"{name}_bytes": max(followed[name]) if name in followed else None
        for name in ("persistent", "peak", "growth", "outside")
    }


def median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if len(seen) == len(values) else None


def arm_of(config: Mapping[str, Any]) -> str:
    """Hash of the configuration without the number of its repetition."""
    return hashlib.sha256(repeated(config).encode()).hexdigest()


def workload_of(config: Mapping[str, Any]) -> str:
    """Hash of the configuration without the engine, its sharding, and the number of its repetition."""
    return hashlib.sha256(repeated(config, ("engine", "sharding")).encode()).hexdigest()
