"""Two ranks whose steps are, in turns, without and with something: its share of a step.

Ranks of one thread train 12.7 M weights (the model of `experiment=bench_comm`) in fp32, so that computing decides. An
uncaptured step and the one after it are a block. A step is all the wall time from the end of one to the end of the
next on rank 0. Figures are shares of the step without, with a bootstrap interval (harness/bench/stats.py):

- `direct`: rank 0's clocks around all that is done for it, over the rest of the same step: a busy machine slows both
  sides alike. It leaves out what that does to caches.
- `extra`: steps with over steps without, by wall time. Leaves nothing out, and needs a quiet machine.
- `extra_cpu`: the same by both ranks' processor time.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import tables
from harness.bench.stats import Interval, median_ratio
from harness.config.schema import CkptPolicy, Config, EngineName, Strategy
from tests.support.factory import small_config, train

SEQUENCES, SEQ_LEN = 16, 512


class Step(NamedTuple):
    """One step of one rank, in seconds; what it was for by part."""

    wall: float
    cpu: float
    parts: dict[str, float]


def config_of(engine: EngineName, strategy: Strategy, steps: int, microbatch: int, **more: Any) -> Config:
    config = small_config(
        engine__name=engine,
        mesh__world_size=2,
        sharding__strategy=strategy,
        data__seq_len=SEQ_LEN,
        data__num_sequences=256,
        train__steps=steps,
        train__global_batch_size=SEQUENCES,
        train__microbatch_size=microbatch,
        train__param_norm_every=0,
        ckpt__policy=CkptPolicy.none,
        **more,
    )
    model = config.model
    model.dim, model.num_layers, model.ffn_dim, model.vocab_size = 512, 4, 1344, 256
    model.num_heads = model.num_kv_heads = 8
    model.max_seq_len = 2048
    return config


def steps_of(config: Config, rank: int, warm_up: int, take: Callable[[], dict[str, float]], **more: Any) -> list[Step]:
    """Every step of this rank after the warm-up; `take` gives the parts since the last call."""
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder:
        began = [time.perf_counter(), time.process_time()]

        def over(_: Any) -> None:
            steps.append(Step(time.perf_counter() - began[0], time.process_time() - began[1], take()))
            for written in Path(folder, "capture").glob("*"):  # in no step's time: the disk need not hold them all
                written.unlink()
            began[:] = time.perf_counter(), time.process_time()

        train(config, Path(folder), rank, progress=over, **more)
    return steps[warm_up:]


def figures(first: Sequence[Step], second: Sequence[Step], whole: str) -> dict[str, Any]:
    """Args: first, second: steps of both ranks, each second one with what is measured. whole: the part that is all."""
    cpu = [one.cpu + other.cpu for one, other in zip(first, second, strict=True)]
    without, having = ([step.wall for step in first[begin::2]] for begin in (0, 1))
    rest = [step.wall - step.parts[whole] for step in first[1::2]]
    return {
        "step_s": round(statistics.median(without), 3),
        "direct": share(median_ratio(having, [rest])),
        "extra": share(median_ratio(having, [without])),
        "extra_cpu": share(median_ratio(cpu[1::2], [cpu[::2]])),
    }


def share(ratio: Interval | None) -> dict[str, float]:
    assert ratio is not None
    return {key: round(getattr(ratio, key) - 1.0, 4) for key in ("value", "low", "high")}


def main(name: str, cells: Collection[str], summary: Callable[[str], dict[str, Any]], **facts: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = sys.argv[1:] or list(cells)
    if unknown := set(names) - set(cells):
        raise SystemExit(f"no cell {', '.join(sorted(unknown))}; there are: {', '.join(cells)}")
    found = {}
    for each in names:
        load = os.getloadavg()[0]
        found[each] = summary(each) | {"load_average": {"before": load, "after": os.getloadavg()[0]}}
        print(each, found[each], flush=True)
    if names == list(cells):
        told = {"weights": "12.7 M, fp32", **facts, "cells": found}
        tables.write(name, told | {"versions": tables.versions("torch"), "cores": os.cpu_count()})
