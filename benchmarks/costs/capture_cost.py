"""What capturing a step costs, whole and by part. Writes data/capture_cost.json.

    python benchmarks/costs/capture_cost.py [CELL ...]

16 sequences a step, four to a microbatch; benchmarks/costs/turns.py says what the figures are. Parts are medians of
rank 0's seconds in a captured step, some within others; hashing goes on beside writing, on two threads.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.costs.turns import SEQ_LEN, SEQUENCES, Step, config_of, figures, main, steps_of
from harness.config.schema import EngineName, Strategy
from harness.probe import capture, witness
from harness.train import captures
from tests.support.spawn import run_ranks

BLOCKS, WARMUP, MICROBATCH, WHOLE = 6, 1, 4, "whole"
UPDATE = ", update"
"""Of cells whose step's update is captured too."""
CELLS = {
    "native optim_grads_params": (EngineName.native, Strategy.optim_grads_params),
    "native no_shard": (EngineName.native, Strategy.no_shard),
    "ddp": (EngineName.ddp, Strategy.no_shard),
    f"native optim_grads_params{UPDATE}": (EngineName.native, Strategy.optim_grads_params),
}


class Parts:
    """Seconds by part of the step under way; a clock around each function that capturing calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._around(witness._Sum, "add", "hooks: local gradients added")
        self._around(witness.Witness, "_forward", "hooks: checksums of weights used")
        self._around(witness.Witness, "kept", "main weights gathered, checksums")
        self._around(witness.Witness, "gradients", "local gradients added over ranks")
        self._around(capture, "save_file", "writing")
        self._around(captures.Captures, "before", "main weights gathered, before")
        self._around(captures.Captures, "reduced", "all but hooks and weights")
        self._around(captures.Captures, "after", "main weights after, step written")
        self.inside = False
        """Whether a clock for the whole runs."""

    def _around(self, owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any) -> Any:
            outermost = not self.inside
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
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def one_cell(rank: int, name: str) -> list[Step]:
    parts, steps = Parts(), WARMUP + 2 * BLOCKS
    captured = list(range(WARMUP + 2, steps + 1, 2))
    kept = {"measure__capture_steps": captured, "measure__update_steps": captured if name.endswith(UPDATE) else []}
    config = config_of(*CELLS[name], steps, MICROBATCH, **kept)
    return steps_of(config, rank, WARMUP, parts.take, wrap_engine=parts.engine)


def summary(name: str) -> dict[str, Any]:
    first, second = run_ranks(one_cell, 2, name)
    captured = [step.parts for step in first[1::2]]
    parts = {part: round(statistics.median(each[part] for each in captured), 4) for part in captured[0]}
    return {"microbatches_a_rank": SEQUENCES // 2 // MICROBATCH, **figures(first, second, WHOLE), "parts_s": parts}


if __name__ == "__main__":
    from benchmarks.costs import capture_cost  # ranks import what they run by name

    main("capture_cost.json", CELLS, capture_cost.summary, blocks=BLOCKS, tokens_a_rank=SEQUENCES // 2 * SEQ_LEN)
