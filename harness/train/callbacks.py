"""Callbacks of the training loop: a user's own classes, and the checks and captures of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pkgutil import resolve_name
from typing import Any

from harness.config.schema import Config
from harness.engines.protocol import Engine, Microbatch
from harness.train.session import Session


class Callback:
    """One object on each rank. All ranks call every hook in the same order, so that hooks may call collectives.

    Steps count from 1. Time and collectives of hooks are not counted. State is not saved: results must follow from the
    step alone, or a resumed run differs from an uninterrupted one.
    """

    def __init__(self, config: Config) -> None:
        """Called before the first step, with the entire configuration."""
        self.config = config

    def begin(self, step: int, engine: Engine) -> None:
        """Called before the first step of an attempt, with the number of steps done: 0, or that of the checkpoint."""

    def before(self, step: int, batches: Sequence[Microbatch], engine: Engine) -> None:
        """Called before a step's first forward, with the microbatches of this rank."""

    def watch(self, step: int, engine: Engine) -> AbstractContextManager[Any]:
        """Context manager around a step's forwards and backwards."""
        return nullcontext()

    def reduced(self, step: int, engine: Engine) -> None:
        """Called with averaged gradients over all ranks (`engine.local_gradients`), before clipping and the update."""

    def after(self, step: int, lr: float, grad_norm: float, engine: Engine) -> None:
        """Called after the update, before ranks exchange their losses; grad_norm: before clipping."""

    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> Mapping[str, float] | None:
        """Called at the end of a step, with its line of the record, and the engine with the new weights.

        Returns numbers by name, or None. Those of rank 0 are recorded under `own`.
        """
        return None

    def evaluation(self, step: int, losses: Mapping[int, float], engine: Engine) -> bool:
        """Called after an evaluation, with the held-out loss of every step so far, also of earlier attempts.

        True, on any rank, ends the run here: it is done.
        """
        return False

    def checkpoint(self, step: int, engine: Engine) -> None:
        """Called before a checkpoint is written; files that a resumed run reads must be on disk on return."""

    def end(self, status: str, engine: Engine) -> None:
        """Called after the last step; status is done or preempted."""

    def close(self) -> None:
        """Called last, even after an error; no collectives."""


class EarlyStop(Callback):
    """Ends a run whose held-out loss has not fallen for `patience` evaluations in a row; a subclass may set both.

    min_delta: least fall that counts, in nats a token.
    """

    patience = 3
    min_delta = 0.0

    def evaluation(self, step: int, losses: Mapping[int, float], engine: Engine) -> bool:
        best, waited = math.inf, 0
        for _, loss in sorted(losses.items()):
            best, waited = (loss, 0) if loss < best - self.min_delta else (best, waited + 1)
        return waited >= self.patience


class Callbacks:
    """Every callback of a run; a hook without callbacks costs nothing."""

    def __init__(self, session: Session, callbacks: Sequence[Callback]) -> None:
        self._engine, self._meters, self._all = session.engine, session.meters, callbacks

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Results of a hook of every callback; their collectives are not counted."""
        if not self._all:
            return []
        with self._meters.paused():
            return [getattr(each, hook)(*args, self._engine) for each in self._all]

    def watch(self, step: int, watches: ExitStack) -> None:
        for each in self._all:
            watches.enter_context(each.watch(step, self._engine))

    def reduced(self, step: int) -> None:
        if self._all:
            with self._meters.timers.aside():
                self.call("reduced", step)

    def close(self) -> None:
        with self._meters.paused():
            for each in self._all:
                each.close()

    def step(self, step: int, record: Mapping[str, Any]) -> dict[str, float]:
        """Joined numbers of a step. Raises `ValueError`: two callbacks return one name."""
        joined: dict[str, float] = {}
        with self._meters.paused():
            for each in self._all:
                found = each.step(step, record, self._engine)
                numbers = {} if found is None else {name: float(value) for name, value in dict(found).items()}
                if same := numbers.keys() & joined.keys():
                    raise ValueError(f"measure.callbacks: two return {', '.join(same)}")
                joined |= numbers
        return joined


def made(config: Config) -> list[Callback]:
    """The user's callbacks."""
    return [resolve_name(name)(config) for name in config.measure.callbacks]
