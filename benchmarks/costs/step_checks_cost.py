"""What it costs that every step is looked at (`measure.step_checks`). Writes data/step_checks_cost.json.

    python benchmarks/costs/step_checks_cost.py [CELL ...]

4096 tokens a rank and step, in one microbatch or in two: local gradients, and weights as forwards see them, are looked
at in each. benchmarks/costs/turns.py says what the figures are; its clocks are around all that looking does, in hooks
and between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from benchmarks.costs.turns import SEQ_LEN, SEQUENCES, Step, config_of, figures, main, steps_of
from harness.config.schema import EngineName, Strategy
from harness.train import loop
from harness.train.callbacks import Callback
from harness.train.step_checks import StepChecks
from tests.support.spawn import run_ranks

BLOCKS, WARMUP = 8, 2
LOOKING = "looking"
IN_TWO = ", two microbatches"
CELLS = {
    **{f"native {each.name}": (EngineName.native, each) for each in Strategy},
    "fsdp2 optim_grads_params": (EngineName.fsdp2, Strategy.optim_grads_params),
    "ddp": (EngineName.ddp, Strategy.no_shard),
}
CELLS |= {f"{name}{IN_TWO}": CELLS[name] for name in ("native no_shard", "native optim_grads_params")}


class EveryOther(Callback):
    """Looks at every second step only, and counts what that takes."""

    def __init__(self, step_checks: StepChecks) -> None:
        super().__init__(step_checks.config)
        self.step_checks, self.looks, self.seconds = step_checks, False, 0.0
        step_checks.again_at, step_checks.looks_for_drift = 0, False  # once in a run, and no part of a step's cost
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

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, 0.0
        return {LOOKING: taken}


def one_cell(rank: int, name: str) -> list[Step]:
    found: list[EveryOther] = []

    class Opened:
        @staticmethod
        def open(*args: Any) -> EveryOther:
            step_checks = StepChecks.open(*args)
            assert step_checks is not None
            found.append(EveryOther(step_checks))
            return found[0]

    loop.StepChecks = Opened  # type: ignore[misc, assignment] # in this process alone
    microbatch = SEQUENCES // (4 if name.endswith(IN_TWO) else 2)
    kept = {"measure__capture_steps": [], "measure__step_checks": True}
    config = config_of(*CELLS[name], WARMUP + 2 * BLOCKS, microbatch, **kept)
    return steps_of(config, rank, WARMUP, lambda: found[0].take())


def summary(name: str) -> dict[str, Any]:
    return figures(*run_ranks(one_cell, 2, name), LOOKING)


if __name__ == "__main__":
    from benchmarks.costs import step_checks_cost as this  # ranks import what they run by name

    main("step_checks_cost.json", this.CELLS, this.summary, blocks=BLOCKS, tokens_a_rank=SEQUENCES // 2 * SEQ_LEN)
