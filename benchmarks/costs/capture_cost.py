"""What capturing a step costs, whole and by part. Writes data/capture_cost.json.

    python benchmarks/costs/capture_cost.py [CELL ...]

Two ranks of one thread train 12.7 M weights (the model of `experiment=bench_comm`) in fp32 on 16 sequences a step, four
to a microbatch, so that computing decides. Steps are captured in turn: an uncaptured one and the captured one after it
are a block. A step is all the wall time from the end of one to the end of the next on rank 0, the rank that writes:
data, exchange, record and capture, not only what `step_time_s` counts. Three figures, each a share of the step without
its capture, with a bootstrap interval (harness/bench/stats.py):

- `direct`: clocks around all that the loop and the hooks do for a capture, waiting for the other rank included. What it
  leaves out is what capturing does to caches. Of one step each, so that a busy machine slows both sides alike.
- `extra`: captured over uncaptured steps, by wall. Leaves nothing out, and needs a quiet machine.
- `extra_cpu`: the same by both ranks' processor time.

Parts are medians of rank 0's seconds in a captured step, some within others; hashing goes on beside writing, on two
threads.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from harness.bench.stats import Interval, median_ratio
from harness.config.schema import CkptPolicy, Config, EngineName, Strategy
from harness.probe import capture, witness
from harness.train import captures
from tests.support.factory import small_config, train
from tests.support.spawn import run_ranks

BLOCKS = 6
WARMUP = 1
SEQUENCES = 16
MICROBATCH = 4
WHOLE = "whole"
OUTPUT = Path(__file__).resolve().parents[1] / "data" / "capture_cost.json"


class Cell(NamedTuple):
    """What is run."""

    engine: EngineName
    strategy: Strategy
    seq_len: int
    update: bool = False
    """Whether the step's update is captured too."""


NATIVE, ZERO3 = EngineName.native, Strategy.optim_grads_params
CELLS = {
    "native optim_grads_params": Cell(NATIVE, ZERO3, 512),
    "native no_shard": Cell(NATIVE, Strategy.no_shard, 512),
    "ddp": Cell(EngineName.ddp, Strategy.no_shard, 512),
    "native optim_grads_params, update": Cell(NATIVE, ZERO3, 512, update=True),
}


def config_of(cell: Cell) -> Config:
    """The cell's configuration; every second step after the warm-up is captured."""
    steps = WARMUP + 2 * BLOCKS
    captured = list(range(WARMUP + 2, steps + 1, 2))
    config = small_config(
        engine__name=cell.engine,
        mesh__world_size=2,
        sharding__strategy=cell.strategy,
        data__seq_len=cell.seq_len,
        data__num_sequences=256,
        train__steps=steps,
        train__global_batch_size=SEQUENCES,
        train__microbatch_size=MICROBATCH,
        train__param_norm_every=0,
        measure__capture_steps=captured,
        measure__update_steps=captured if cell.update else [],
        ckpt__policy=CkptPolicy.none,
    )
    model = config.model
    model.dim, model.num_layers, model.ffn_dim, model.vocab_size = 512, 4, 1344, 256
    model.num_heads = model.num_kv_heads = 8
    model.max_seq_len = 2048
    return config


class Parts:
    """Seconds by part of the step under way; a clock around each function that capturing calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._around(witness._Sum, "add", "hooks: local gradients added")
        self._around(witness.Witness, "_forward", "hooks: checksums of weights used")
        self._around(witness.Witness, "kept", "main weights gathered, checksums")
        self._around(witness.Witness, "gradients", "local gradients added over ranks")
        self._around(capture, "save_file", "writing")
        self._around(capture, "_facts", "hashing, beside writing", beside=True)
        self._around(captures.Captures, "_weights", "main weights gathered, before and after")
        self._around(captures.Captures, "_update", "main weights after, update written")
        self._around(captures.Captures, "_gradients", "all but hooks and updates")
        self.inside = False
        """Whether a clock for the whole runs."""

    def _around(self, owner: Any, name: str, part: str, *, beside: bool = False) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any) -> Any:
            outermost = not (beside or self.inside)
            self.inside = self.inside or outermost
            began = time.perf_counter()
            try:
                return inner(*args)
            finally:
                spent = time.perf_counter() - began
                self.seconds[part] += spent
                if outermost:
                    self.seconds[WHOLE] += spent
                    self.inside = False

        setattr(owner, name, timed)

    def engine(self, engine: Any) -> Any:
        """The engine, with a clock around the gathering of its gradients."""
        gather = engine.named_gradients
        engine.named_gradients = lambda: self._each(gather())
        return engine

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            item = next(iterator, None)
            self.seconds["main gradients gathered"] += time.perf_counter() - began
            if item is None:
                return
            yield item

    def take(self) -> dict[str, float]:
        """What has been counted since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def one_cell(rank: int, name: str) -> list[tuple[float, float, dict[str, float]]]:
    """Wall seconds, processor seconds and parts of every step on this rank."""
    parts = Parts()
    steps: list[tuple[float, float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        began = [time.perf_counter(), time.process_time()]

        def over(_: Any) -> None:
            steps.append((time.perf_counter() - began[0], time.process_time() - began[1], parts.take()))
            for written in (path / "capture").glob("*"):  # in no step's time: the disk need not hold them all
                written.unlink()
            began[:] = time.perf_counter(), time.process_time()

        train(config_of(CELLS[name]), path, rank, progress=over, wrap_engine=parts.engine)
    return steps[WARMUP:]


def summary(name: str) -> dict[str, Any]:
    """Run a cell; its figures."""
    print(name, file=sys.stderr)
    config, load = config_of(CELLS[name]), os.getloadavg()[0]
    first, second = run_ranks(one_cell, 2, name)
    wall = [step[0] for step in first]
    cpu = [one[1] + other[1] for one, other in zip(first, second, strict=True)]
    captured = [parts for _, _, parts in first[1::2]]
    rest = [seconds - parts[WHOLE] for seconds, _, parts in first[1::2]]
    return {
        "tokens_a_rank": SEQUENCES // 2 * config.data.seq_len,
        "microbatches_a_rank": SEQUENCES // 2 // MICROBATCH,
        "step_s": round(statistics.median(wall[::2]), 3),
        "direct": interval(median_ratio(wall[1::2], [rest])),
        "extra": interval(median_ratio(wall[1::2], [wall[::2]])),
        "extra_cpu": interval(median_ratio(cpu[1::2], [cpu[::2]])),
        "parts_s": {part: round(statistics.median(each[part] for each in captured), 4) for part in captured[0]},
        "load_average": {"before": load, "after": os.getloadavg()[0]},
    }


def interval(ratio: Interval | None) -> dict[str, float]:
    """A ratio as a share beyond one."""
    assert ratio is not None
    return {key: round(getattr(ratio, key) - 1.0, 4) for key in ("value", "low", "high")}


def main() -> None:
    """Measure the cells named, or all, and write."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = sys.argv[1:] or list(CELLS)
    if unknown := set(names) - set(CELLS):
        raise SystemExit(f"no cell {', '.join(sorted(unknown))}; there are: {', '.join(CELLS)}")
    result = {
        "weights": "12.7 M, fp32",
        "blocks": BLOCKS,
        "cells": {name: summary(name) for name in names},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
    }
    text = json.dumps(result, indent=2) + "\n"
    if names == list(CELLS):
        OUTPUT.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
