"""What watching for hangs costs a step. Writes data/watchdog_cost.json.

    python benchmarks/fsdp/watchdog_cost.py

`off` and `on`: processor time of one rank (its threads together) for whole steps, taken in turns, because other
processes on the machine take wall time, not that; median, quartiles. `alone`: what the watchdog does in such a step, by
itself (a note for each collective and each wait, and its share of the looks at waits), which a difference of two
steps is too small to resolve. `checked`: wall time of a step whose collectives are compared beforehand, for contrast.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Any

import torch

from benchmarks.costs.nan_guard import RANKS, TOKENS, batch_of, config_of
from benchmarks.pages import tables
from harness.config.schema import Strategy
from harness.engines.adapters.native import NativeEngine
from harness.engines.protocol import Ranks
from harness.fsdp import Observer
from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.watches import end_watch
from harness.models.workload import LlamaWorkload
from harness.watchdog import Watchdog
from tests.support.spawn import run_ranks

STEPS = 16
REPEATS = 200
LIMIT_S = 60.0
MODES = ("off", "on", "checked")


class Counter(Observer):
    """Collectives and waits of one step."""

    def __init__(self) -> None:
        self.begun: list[Label] = []
        self.waits = 0

    def collective(self, kind: str, bucket: str) -> None:
        self.begun.append(Label(kind, bucket))

    def waited(self, seconds: float) -> None:
        self.waits += 1


def engine_of(rank: int, strategy: str, mode: str) -> NativeEngine:
    config = config_of(strategy, guarded=False)
    config.engine.watchdog_timeout_s = LIMIT_S
    config.engine.check_collectives = mode == "checked"
    engine = NativeEngine(LlamaWorkload(config), config, Ranks(rank, RANKS, rank, torch.device("cpu")))
    if mode == "off":
        end_watch(engine.model._parts.watchdog)
    return engine


def measure(rank: int, strategy: str) -> dict[str, Any]:
    """Milliseconds a step: quartiles for each mode, and the watchdog alone."""
    row: dict[str, Any] = {}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    counter = Counter()
    batch = batch_of(rank)
    for turn in range(4):  # an engine's listeners hear every engine of the process, so only one lives at a time
        for mode in MODES if turn % 2 else MODES[::-1]:
            engine = engine_of(rank, strategy, mode)
            for step in range(STEPS // 4 + 2):
                clock = time.perf_counter if mode == "checked" else time.process_time
                counted = turn == 0 and mode == "off" and step == 3
                if counted:
                    counter.attach()
                began = clock()
                engine.forward_backward(batch, last=True)
                engine.step(1e-3)
                if step >= 2:
                    times[mode].append((clock() - began) * 1e3)
                counter.detach()
            engine.close()
    for mode in MODES:
        low, middle, high = statistics.quantiles(times[mode], n=4)
        row[mode] = {"p25_ms": low, "median_ms": middle, "p75_ms": high}
    row["collectives"], row["waits"] = len(counter.begun), counter.waits
    row["alone_ms"] = _alone(counter)
    return row


def _alone(counter: Counter) -> dict[str, float]:
    """Quartiles of the notes of one step, with and without a watchdog, and its looks at waits in a second."""
    group: Any = torch.distributed.group.WORLD

    def notes() -> float:
        began = time.process_time()
        for label in counter.begun:
            with events.begin(label):
                pass
        for index in range(counter.waits):
            with events.waiting(counter.begun[index % len(counter.begun)]):
                pass
        return (time.process_time() - began) * 1e3

    without = statistics.median(notes() for _ in range(REPEATS))
    watchdog = Watchdog([group], LIMIT_S, records=False)
    events.watch(watchdog)
    noted = statistics.quantiles([notes() for _ in range(REPEATS)], n=4)
    looks = []
    for _ in range(REPEATS):
        began = time.process_time()
        watchdog._reason()
        looks.append((time.process_time() - began) * 1e3 / watchdog.tick_s)
    events.unwatch(watchdog)
    watchdog.close()
    low, middle, high = (value - without for value in noted)
    return {"p25": low, "median": middle, "p75": high, "looks_per_second": statistics.median(looks)}


def measure_all(rank: int) -> dict[str, dict[str, Any]]:
    return {strategy.name: measure(rank, strategy.name) for strategy in Strategy}


def main() -> None:
    rows = run_ranks(measure_all, RANKS)[0]
    titles = f"{'off ms':>22} {'on ms':>22} {'alone ms':>9} {'looks ms/s':>11} {'share':>8} {'checked ms':>11}"
    print(f"{'strategy':20} {titles}")
    for strategy, row in rows.items():
        off, alone = row["off"]["median_ms"], row["alone_ms"]
        row["alone_share"] = alone["median"] / off + alone["looks_per_second"] / 1e3
        spread = [f"{m['median_ms']:7.1f} ({m['p25_ms']:.1f}..{m['p75_ms']:.1f})" for m in (row["off"], row["on"])]
        print(
            f"{strategy:20} {spread[0]:>22} {spread[1]:>22} {alone['median']:9.3f} {alone['looks_per_second']:11.3f}"
            f" {row['alone_share']:8.3%} {row['checked']['median_ms']:11.1f}"
        )
    facts = {"torch": torch.__version__, "machine": platform.machine(), "tokens": TOKENS, "rows": rows}
    tables.write("watchdog_cost.json", facts)


if __name__ == "__main__":
    from benchmarks.fsdp import watchdog_cost  # ranks import what they run by name

    watchdog_cost.main()
