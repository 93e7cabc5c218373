"""What the loop is given and what it hands back: everything a worker must put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from harness.config.schema import Config
from harness.data.loader import Loader
from harness.engines.protocol import Engine, Ranks
from harness.probe.meters import Meters


@dataclass(frozen=True)
class Progress:
    """One finished step as its rank saw it, for the terminal and the hang watch; the record says the same in full."""

    rank: int
    step: int
    """Steps done, counted from 1."""
    steps: int
    loss: float
    step_time_s: float
    tokens: int
    memory_bytes: int


@dataclass(frozen=True)
class Session:
    """One rank's run, put together by the worker in this order::

    timed = config.measure.mode is MeasureMode.bench
    meters = Meters(ranks.device, follow_storage=timed)  # before the engine: it counts what the engine issues
    workload = TimedWorkload(workload_for(config), meters.timers)
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
    """A gloo group of all ranks for the loop's own few numbers a step; None with one rank."""
    run_dir: Path
    """The run's directory. Rank 0 writes metrics.jsonl, summary.json and capture/; every rank its part of ckpt/."""
    should_stop: Callable[[], bool]
    """True if this rank was asked to stop; asked once a step. One rank's yes stops all at the same step boundary."""
    progress: Callable[[Progress], None]
    warn: Callable[[str], None] = print
    """Told what a person should know at once; called by rank 0."""
    alive: Callable[[], None] = lambda: None
    """Called by every rank between the parts of work that is no step and may take minutes in a large model."""
    begins: Callable[[int], None] = lambda _: None


@dataclass(frozen=True)
class Outcome:
    """How the loop ended. Failures are exceptions, not outcomes."""

    status: Literal["done", "preempted"]
    step: int
    saved: bool
