"""What guards of the native engine cost a step: the table of docs/engine.md. Writes data/guards.json.

    python benchmarks/fsdp/guards.py

`nan_share`, `watchdog_share`: a guard's own work of a step, by itself, over a step without it; a difference of two
steps is too small to resolve it. Both are processor time of one rank (its threads together), because other processes
on the machine take wall time, not that. The watchdog's work is a note for each collective and each wait, and its share
of the looks at waits. `checked_times`: wall time of a step whose collectives are compared beforehand over that of one
without, in turns.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.pages import tables
from harness.config.schema import EngineName, Strategy
from harness.engines.adapters.native import NativeEngine
from harness.engines.protocol import Microbatch
from harness.fsdp import Observer
from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.watches import end_watch
from harness.models.workload import LlamaWorkload
from harness.watchdog import Watchdog
from tests.support.factory import ranks_of, small_config
from tests.support.spawn import run_ranks

RANKS, WARMUP, STEPS, REPEATS = 2, 2, 16, 200
TOKENS = 256
"""Of one microbatch. The guards' work does not grow with it, the step's does: real runs have far more."""
LIMIT_S = 60.0


class Counter(Observer):
    """Collectives and waits of one step."""

    def __init__(self) -> None:
        self.begun: list[Label] = []
        self.waits = 0

    def collective(self, kind: str, bucket: str) -> None:
        self.begun.append(Label(kind, bucket))

    def waited(self, seconds: float) -> None:
        self.waits += 1


def engine_of(rank: int, strategy: Strategy, *, guarded: bool = False, checked: bool = False) -> NativeEngine:
    """About 7 million parameters in fp32 on two ranks; a watchdog only where it is to compare collectives."""
    config = small_config(
        engine__name=EngineName.native,
        engine__report_nan_in_param_grad=guarded,
        engine__check_collectives=checked,
        sharding__strategy=strategy,
        mesh__world_size=RANKS,
        data__seq_len=TOKENS,
        train__microbatch_size=1,
        train__global_batch_size=RANKS,
    )
    model = config.model
    model.vocab_size, model.dim, model.num_layers, model.ffn_dim = 1024, 256, 8, 768
    model.num_heads, model.num_kv_heads, model.max_seq_len = 4, 4, TOKENS
    engine = NativeEngine(LlamaWorkload(config), config, ranks_of(config, rank))
    if not checked:
        end_watch(engine.model._parts.watchdog)
    return engine


def measure(rank: int, strategy: Strategy) -> dict[str, float]:
    tokens = torch.randint(0, 1024, (1, TOKENS + 1), generator=torch.Generator().manual_seed(rank))
    batch, counter = Microbatch(tokens[:, :-1], tokens[:, 1:]), Counter()
    walls: dict[bool, list[float]] = {False: [], True: []}
    processor: list[float] = []
    for turn in range(4):  # an engine's listeners hear every engine of the process, so only one lives at a time
        for checked in (False, True) if turn % 2 else (True, False):
            engine = engine_of(rank, strategy, checked=checked)
            for step in range(WARMUP + STEPS // 4):
                if turn == 0 and not checked and step == WARMUP - 1:
                    counter.attach()
                began, cpu = time.perf_counter(), time.process_time()
                engine.forward_backward(batch, last=True)
                engine.step(1e-3)
                counter.detach()
                if step >= WARMUP:
                    walls[checked].append(time.perf_counter() - began)
                    processor += [] if checked else [time.process_time() - cpu]
            engine.close()
    off = statistics.median(processor)
    noted, looks_per_second = _watchdog(counter)
    return {
        "off_ms": off * 1e3,
        "nan_share": _nan_guard(engine_of(rank, strategy, guarded=True)) / off,
        "watchdog_share": noted / off + looks_per_second,
        "checked_times": statistics.median(walls[True]) / statistics.median(walls[False]),
    }


def timed(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Lower quartile of processor seconds: a rank that waits for a busy machine takes more."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return statistics.quantiles(seconds, n=4)[0]


def _nan_guard(engine: Any) -> float:
    """Seconds of looking at buckets of the model's sizes and reporting."""
    guard, buckets = engine.model._parts.guard, [each for each in engine.model.buckets if each.trainable]
    gradients = [torch.ones(each.layout.bucket_numel, dtype=each.dtypes.wire) for each in buckets]

    def look() -> None:
        guard.begin_backward()
        for bucket, gradient in zip(buckets, gradients, strict=True):
            guard.look(bucket, gradient)
        guard.report()
        guard.forget()

    seconds = timed(look, STEPS)
    engine.close()
    return seconds


def _watchdog(counter: Counter) -> tuple[float, float]:
    """Seconds of the notes of one step, beyond those without a watchdog; seconds of its looks at waits in a second."""
    group: Any = torch.distributed.group.WORLD

    def notes() -> None:
        for label in counter.begun:
            with events.begin(label):
                pass
        for index in range(counter.waits):
            with events.waiting(counter.begun[index % len(counter.begun)]):
                pass

    without = timed(notes)
    watchdog = Watchdog([group], LIMIT_S, records=False)
    events.watch(watchdog)
    found = timed(notes) - without, timed(watchdog._reason) / watchdog.tick_s
    events.unwatch(watchdog)
    watchdog.close()
    return found


def measure_all(rank: int) -> dict[str, dict[str, float]]:
    return {strategy.name: measure(rank, strategy) for strategy in Strategy}


def main() -> None:
    rows = run_ranks(measure_all, RANKS)[0]
    for strategy, row in rows.items():
        print(strategy, *(f"{key} {value:.5g}" for key, value in row.items()), sep="  ")
    tables.write("guards.json", {"torch": torch.__version__, "machine": platform.machine(), "rows": rows})


if __name__ == "__main__":
    from benchmarks.fsdp import guards  # ranks import what they run by name

    guards.main()
