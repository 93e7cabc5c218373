"""Run directories of a timed study, written as the harness writes them, with step times that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.config.compose import plain
from harness.config.schema import Config
from harness.store.identity import signature
from harness.store.metrics import encode
from harness.store.provenance import sources_digest
from harness.store.rundir import Store
from harness.store.study import write_study
from tests.parity.lab import Cell

WARM_UP, TIMED = 2, 6
ENGINES = {
    ("ddp", "no_shard"): 0.100,
    ("native", "no_shard"): 0.090,
    ("fsdp1", "no_shard"): 0.110,
    ("native", "optim_grads"): 0.150,
    ("fsdp2", "optim_grads"): 0.120,
    ("fsdp1", "optim_grads"): 0.125,
}
"""Seconds a step of each arm."""


def config(engine: str, strategy: str, block: int, **model: Any) -> dict[str, Any]:
    """The frozen configuration of one timed run."""
    values: dict[str, Any] = plain(OmegaConf.structured(Config))
    values["engine"]["name"], values["sharding"]["strategy"] = engine, strategy
    values["measure"] |= {"mode": "bench", "warmup_steps": WARM_UP, "capture_steps": []}
    values["train"] |= {"steps": WARM_UP + TIMED, "replicate": block}
    values["ckpt"]["policy"] = "none"
    values["study"]["name"], values["study"]["question"] = "lab", "What does a step cost?"
    values["model"] |= model
    return values


def line(step: int, seconds: float, exposed: float | None) -> dict[str, Any]:
    """One step's record; warm-up steps are ten times slower, so that none is taken for a timed one."""
    slow = 10.0 if step <= WARM_UP else 1.0
    return {
        "step": step,
        "loss": 5.0 - 0.01 * step,
        "tokens": 1000,
        "step_time_s": slow * seconds,
        "time": {
            "data_s": 0.001,
            "forward_s": 0.3 * seconds,
            "backward_s": 0.6 * seconds,
            "exposed_comm_s": exposed,
            "optimizer_s": 0.1 * seconds,
        },
        "memory": {"peak_tensor_bytes": None, "persistent_tensor_bytes": None, "rss": 2**28 + step},
        "comm": {"all_reduce": {"count": 3, "bytes": 2**20}},
    }


def write(
    root: Path,
    values: dict[str, Any],
    seconds: Sequence[float],
    *,
    load: Mapping[str, float] = {"at_start": 1.0, "at_end": 2.0, "others_cores": 0.0, "timed_s": 1.0},
    tensors: Mapping[str, Any] | None = None,
    planned: Mapping[str, int | None] | None = None,
    ended: str = "2026-01-01T00:00:00+00:00",
    **origin: Any,
) -> Path:
    """Write one run with these timed steps; returns its path."""
    run = Store(root).create(Cell(values))
    exposed = 0.002 if values["engine"]["name"] == "native" else None
    times = [seconds[0]] * WARM_UP + list(seconds)
    lines = [line(step, time, exposed) for step, time in enumerate(times, start=1)]
    run.metrics.write_text("".join(encode(one) + "\n" for one in lines))
    tensors = tensors or {"step": WARM_UP, "persistent": [100, 120], "peak": [300, 310], "growth": [0, 0]}
    facts = {"accounted_bytes": {"main_weights": 90}, "load": dict(load), "tensor_bytes": tensors, "planned": planned}
    run.summary.write_text(json.dumps(facts))
    provenance = {"sources_digest": sources_digest(), "versions": {"torch": "2.13.0"}, "cpu_model": "a processor"}
    run.provenance.write_text(json.dumps(provenance | origin))
    (run.path / "status.json").write_text(
        json.dumps({"state": "done", "reason": "", "attempt": 0, "keeper": "process", "updated": ended})
    )
    return run.path


def study(
    root: Path,
    blocks: int = 5,
    factor: Callable[[str, str, int], float] = lambda engine, strategy, block: 1.0 + 0.01 * block,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda cell: {},
    engines: Mapping[tuple[str, str], float] = ENGINES,
    **model: Any,
) -> list[dict[str, Any]]:
    """A whole study; every arm is held against DDP. `change` gives further arguments of `write` for a configuration."""
    configs = [config(engine, strategy, block, **model) for block in range(blocks) for engine, strategy in engines]
    for place, values in enumerate(configs):
        engine, strategy, block = values["engine"]["name"], values["sharding"]["strategy"], values["train"]["replicate"]
        seconds = engines[engine, strategy] * factor(engine, strategy, block)
        steps = [seconds * (1.0 + 0.001 * number) for number in range(TIMED)]
        write(root, values, steps, **({"ended": f"2026-01-01T00:{place:02}:00+00:00"} | change(values)))
    return configs


def record(root: Path, configs: Sequence[dict[str, Any]]) -> None:
    """Write `study.json`: the control of every arm is DDP in its block."""
    controls, listed = {}, {signature(values) for values in configs}
    for values in configs:
        other = json.loads(json.dumps(values))
        other["engine"]["name"], other["sharding"]["strategy"] = "ddp", "no_shard"
        control = signature(other)
        if signature(values) != control and control in listed:
            controls[signature(values)] = control
    write_study(root, [Cell(values) for values in configs], controls)
