"""What it costs that every step is looked at (`measure.step_checks`). Writes data/step_checks_cost.json.

    python benchmarks/costs/step_checks_cost.py [CELL ...]

Two ranks of one thread train 12.7 M weights (the model of `experiment=bench_comm`) in fp32, so that computing decides,
on 4096 tokens a rank and step, in one microbatch or in two: local gradients, and weights as forwards see them, are
looked at in each. Steps are in turns without and with the checks. A step is all the wall time from the end of one to
the end of the next on rank 0. Figures are shares of the step without, with a bootstrap interval
(harness/bench/stats.py):

- `direct`: rank 0's clocks around all that looking does, in hooks and between, over the rest of the same step: a busy
  machine slows both sides alike. It leaves out what that does to caches.
- `extra`: steps with over steps without. Leaves nothing out, and needs a quiet machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import tables
from harness.bench.stats import Interval, median_ratio
from harness.config.schema import CkptPolicy, EngineName, Strategy
from harness.train import loop
from harness.train.callbacks import Callback
from harness.train.step_checks import StepChecks
from tests.support.factory import small_config, train
from tests.support.spawn import run_ranks

BLOCKS, WARMUP, SEQUENCES, SEQ_LEN = 8, 2, 16, 512
"""A block is a step without and the one after it, with."""
IN_TWO = ", two microbatches"
CELLS = {
    **{f"native {each.name}": (EngineName.native, each) for each in Strategy},
    "fsdp2 optim_grads_params": (EngineName.fsdp2, Strategy.optim_grads_params),
    "ddp": (EngineName.ddp, Strategy.no_shard),
}
CELLS |= {f"{name}{IN_TWO}": CELLS[name] for name in ("native no_shard", "native optim_grads_params")}
SMALL = ", 3.4 M weights"
CELLS |= {f"{name}{SMALL}": CELLS[name] for name in ("native no_shard", "native optim_grads_params")}


class Step(NamedTuple):
    """Seconds of one step, and of looking within it."""

    wall: float
    looking: float


class EveryOther(Callback):
    """Looks at every second step only, and counts what that takes."""

    def __init__(self, step_checks: StepChecks) -> None:
        super().__init__(step_checks.config)
        self.step_checks, self.looks, self.seconds, self.again_s = step_checks, False, 0.0, step_checks.again_s
        step_checks.again_at, step_checks.looks_for_drift = (
            frozenset(),
            False,
        )  # once in a run, and no part of a step's cost
        timers = step_checks.session.meters.timers
        inner = timers.aside

        @contextmanager
        def aside() -> Iterator[None]:
            began = time.perf_counter()
            with inner():
                yield
            self.seconds += self.looks * (time.perf_counter() - began)

        timers.aside = aside  # type: ignore[method-assign] # all that is done within a step, hooks too

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args)
        finally:
            self.seconds += time.perf_counter() - began

    def before(self, step: int, *args: Any) -> None:
        self.looks = step % 2 == 0  # what the last such step left is another's by now, and costs as much to compare
        if self.looks:
            self.step_checks.before(step, *args)

    def watch(self, *args: Any) -> Any:
        return self.step_checks.watch(*args) if self.looks else nullcontext()

    def reduced(self, *args: Any) -> None:
        if self.looks:
            self.step_checks.reduced(*args)

    def after(self, *args: Any) -> None:
        if self.looks:
            self._timed(self.step_checks.after, *args)

    def step(self, *args: Any) -> None:
        if self.looks:
            self._timed(self.step_checks.step, *args)

    def close(self) -> None:
        self.step_checks.close()

    def take(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


def one_cell(rank: int, name: str) -> list[Step]:
    """Every step of this rank after the warm-up."""
    found: list[EveryOther] = []

    class Opened:
        @staticmethod
        def open(*args: Any) -> EveryOther:
            step_checks = StepChecks.open(*args)
            assert step_checks is not None
            found.append(EveryOther(step_checks))
            return found[0]

    loop.StepChecks = Opened  # type: ignore[misc, assignment] # in this process alone
    engine, strategy = CELLS[name]
    config = small_config(
        engine__name=engine,
        mesh__world_size=2,
        sharding__strategy=strategy,
        data__seq_len=SEQ_LEN,
        data__num_sequences=256,
        train__steps=WARMUP + 2 * BLOCKS,
        train__global_batch_size=SEQUENCES,
        train__microbatch_size=SEQUENCES // (4 if name.endswith(IN_TWO) else 2),
        train__param_norm_every=0,
        ckpt__policy=CkptPolicy.none,
        measure__capture_steps=[],
        measure__step_checks=True,
    )
    model = config.model
    model.dim, model.ffn_dim = (256, 704) if name.endswith(SMALL) else (512, 1344)
    model.num_layers, model.vocab_size = 4, 256
    model.num_heads = model.num_kv_heads = 8
    model.max_seq_len = 2048
    steps: list[Step] = []
    ends = [time.perf_counter()]

    def over(_: Any) -> None:
        ends.append(time.perf_counter())
        steps.append(Step(ends[-1] - ends[-2], found[0].take()))

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), rank, progress=over)
    return steps[WARMUP:]


def summary(name: str) -> dict[str, Any]:
    return figures(run_ranks(one_cell, 2, name)[0])


def figures(steps: list[Step]) -> dict[str, Any]:
    """Args: steps: in turns without and with what is looked at."""
    without, having = ([step.wall for step in steps[begin::2]] for begin in (0, 1))
    rest = [step.wall - step.looking for step in steps[1::2]]
    return {
        "step_s": round(statistics.median(without), 3),
        "direct": share(median_ratio(having, [rest])),
        "extra": share(median_ratio(having, [without])),
    }


def share(ratio: Interval | None) -> dict[str, float]:
    assert ratio is not None
    return {key: round(getattr(ratio, key) - 1.0, 4) for key in ("value", "low", "high")}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = tables.parser(__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"{'; '.join(CELLS)} (default: all)")
    names = parser.parse_args().cells or list(CELLS)
    if unknown := set(names) - set(CELLS):
        parser.error(f"no cell {', '.join(sorted(unknown))}")
    found = {}
    for name in names:
        load = os.getloadavg()[0]
        found[name] = summary(name) | {"load_average": {"before": load, "after": os.getloadavg()[0]}}
        print(name, found[name], flush=True)
    if names == list(CELLS):
        told = {
            "weights": f"12.7 M, or what{SMALL} says; fp32",
            "blocks": BLOCKS,
            "tokens_a_rank": SEQUENCES // 2 * SEQ_LEN,
            "cells": found,
        }
        tables.write("step_checks_cost.json", told | {"versions": tables.versions("torch"), "cores": os.cpu_count()})


if __name__ == "__main__":
    from benchmarks.costs import step_checks_cost  # ranks import what they run by name

    step_checks_cost.main()
