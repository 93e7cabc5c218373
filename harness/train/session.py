"""Input and output of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.schema import Config
from harness.data.loader import Loader
from harness.engines.protocol import Engine, Microbatch, Ranks, Workload
from harness.probe.meters import Meters, Timers


@dataclass(frozen=True)
class Session:
    """One rank's run, put together by the worker in this order::

    timed = config.measure.mode is MeasureMode.bench
    meters = Meters(ranks.device, follow_storage=timed)  # before the engine: it counts what the engine issues
    workload = timed_workload(workload_for(config), meters.timers)
    engine = engine_class(config.engine.name, config.engine.adapter)(workload, config, ranks)
    loader = Loader(config, ranks.data_rank)
    control = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
    outcome = run(Session(config, ranks, engine, loader, meters, control, run_dir, should_stop, progress))
    """

    config: Config
    ranks: Ranks
    engine: Engine
    loader: Loader
    meters: Meters
    control: dist.ProcessGroup | None
    """Gloo group of all ranks for control messages; None with one rank."""
    run_dir: Path
    """Run directory. Rank 0 writes metrics.jsonl, summary.json and capture/; every rank its part of ckpt/."""
    should_stop: Callable[[], bool]
    """True if this rank was asked to stop; polled once a step. Any rank stops all at the same step boundary."""
    progress: Callable[[Mapping[str, Any]], None]
    """Called by every rank after every step with the record that rank 0 writes."""
    warn: Callable[[str], None] = print
    """Called by rank 0 with a warning."""
    alive: Callable[[], None] = lambda: None
    planned: Mapping[str, int | None] | None = None
    """On rank 0 of a timed run: bytes that its plan has."""
    begins: Callable[[int], None] = lambda _: None
    """Called by every rank before every step, with its number."""


@dataclass(frozen=True)
class Outcome:
    status: Literal["done", "preempted"]
    step: int
    saved: bool
    """True if ckpt/ has a checkpoint of exactly this step."""


def timed_workload(inner: Workload, timers: Timers, alive: Callable[[], None] = lambda: None) -> Workload:
    """The workload with its `loss` in a `forward` span, and with each of its initial weights calling `alive`."""

    def initial_weight(name: str, shape: torch.Size) -> Tensor:
        alive()
        return inner.initial_weight(name, shape)

    def loss(model: nn.Module, batch: Microbatch) -> Tensor:
        with timers.span("forward"):
            return inner.loss(model, batch)

    made = copy(inner)
    vars(made).update(initial_weight=initial_weight, loss=loss)
    return made
