"""Chosen steps in torch's profiler, as `trace/step-000004.rank-0.json.gz`: a file for each row of neighbouring steps.

The step before the first one warms the profiler up. Beside the engine's own marks, a trace has the spans of the loop.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerAction, profile

from harness.store.files import private_folder
from harness.train.session import Session

MOST_ALLOCATIONS = 1_000_000
"""Events that a memory snapshot keeps."""


def untimed(steps: list[int]) -> set[int]:
    """Steps whose times a profiler changes: traced ones, those that warm it up, and those that wait for its files."""
    return {near for step in steps for near in (step - 1, step, step + 1)}


class Trace:
    """Profiler of this rank's next steps; none if no traced step is left.

    Args: done: steps before this attempt.
    """

    def __init__(self, session: Session, done: int) -> None:
        measure, rank = session.config.measure, session.ranks.rank
        self.steps = frozenset(step for step in measure.trace_steps if step > done)
        self.snapshots = measure.memory_snapshot
        self.folder, self.rank = session.run_dir / "trace", rank
        self.step = done
        self.profiler: profile | None = None
        if self.steps and rank in (measure.trace_ranks or [rank]):
            private_folder(self.folder)
            self.profiler = profile(
                schedule=lambda before: self._action(done + 1 + before),
                on_trace_ready=self._write,
                record_shapes=True,
                profile_memory=True,
                acc_events=True,  # torch warns where it forgets
            )
            self.profiler.start()
            self._begin_snapshot(done + 1)

    def _action(self, step: int) -> ProfilerAction:
        if step in self.steps:
            return ProfilerAction.RECORD if step + 1 in self.steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step + 1 in self.steps else ProfilerAction.NONE

    def after(self, step: int) -> None:
        """End a step, and write the traces that end with it."""
        if self.profiler is None:
            return
        self.step = step
        self.profiler.step()
        self._begin_snapshot(step + 1)
        if step >= max(self.steps):
            self.close()

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _begin_snapshot(self, step: int) -> None:
        if self.snapshots and step in self.steps and step - 1 not in self.steps:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def _write(self, profiler: profile) -> None:
        first = self.step
        while first - 1 in self.steps:
            first -= 1
        name = f"step-{first:06d}.rank-{self.rank}"
        unfinished = self.folder / f".{name}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.rename(self.folder / f"{name}.json.gz")
        if self.snapshots:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
