"""Callbacks: which hook is called when, and what is recorded of what `step` returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.config.schema import CkptPolicy
from harness.store.metrics import read_metrics
from harness.train.callbacks import Callback, Callbacks, made
from tests.support.factory import small_config, train
from tests.support.mutants import finds

RETURNED: dict[str, Any] = {}


class First(Callback):
    """Returns what a test says."""

    def step(self, step: int, record: Any, engine: Any) -> Any:
        return RETURNED["First"]


class Second(First):
    """Another one."""

    def step(self, step: int, record: Any, engine: Any) -> Any:
        return RETURNED["Second"]


def joined(first: Any, second: Any = None) -> dict[str, float]:
    RETURNED.update(First=first, Second=second)
    names = [f"{__name__}:{each}" for each in RETURNED]
    config: Any = SimpleNamespace(measure=SimpleNamespace(callbacks=names))
    session: Any = SimpleNamespace(engine=None, meters=SimpleNamespace(paused=nullcontext))
    return Callbacks(session, made(config)).step(1, {})


def test_numbers_are_joined_by_name() -> None:
    found = joined({"a": np.float32(0.5), "n": np.int64(3), "t": torch.tensor(2)}, {"b": 1})
    assert found == {"a": 0.5, "n": 3.0, "t": 2.0, "b": 1.0}
    assert {type(value) for value in found.values()} == {float}
    assert joined(None, {}) == {}
    with pytest.raises(ValueError, match="two return a"):
        joined({"a": 1}, {"a": 2})
    with pytest.raises(TypeError):
        joined(0.0)


CALLED: list[str] = []
HOOK_S = 0.25


class Everywhere(Callback):
    """Notes every hook, with what the engine holds there, and takes long in each."""

    def begin(self, step: int, engine: Any) -> None:
        self.note(f"begin {step}")

    def before(self, step: int, batches: Any, engine: Any) -> None:
        self.weight = weight_of(engine)
        self.note(f"before {step} {len(batches)}")

    @contextmanager
    def watch(self, step: int, engine: Any) -> Iterator[None]:
        self.note("watch")
        yield
        self.note("watched")

    def reduced(self, step: int, engine: Any) -> None:
        gradients = engine.local_gradients()
        self.note(f"reduced {set(gradients) == set(dict(engine.named_weights()))} {self.moved(engine)}")

    def after(self, step: int, lr: float, grad_norm: float, engine: Any) -> None:
        self.note(f"after {grad_norm > 0} {self.moved(engine)}")

    def step(self, step: int, record: Any, engine: Any) -> Any:
        self.note(f"step {step} {record['step']}")
        if step == self.config.train.seed:
            raise RuntimeError("stop here")

    def checkpoint(self, step: int, engine: Any) -> None:
        self.note(f"checkpoint {step}")

    def end(self, status: str, engine: Any) -> None:
        self.note(f"end {status}")

    def close(self) -> None:
        self.note("close")

    def moved(self, engine: Any) -> str:
        return "same" if torch.equal(weight_of(engine), self.weight) else "moved"

    def note(self, what: str) -> None:
        time.sleep(HOOK_S)
        CALLED.append(what)


def weight_of(engine: Any) -> torch.Tensor:
    weight: torch.Tensor = next(weight for _, weight in engine.named_weights())
    return weight.clone()


def step_of(number: int) -> list[str]:
    watched = ["watch", "watched", "reduced True same", "after True moved"]
    return [f"before {number} 4", *watched, f"step {number} {number}"]


def called(root: Path, **changes: Any) -> list[str]:
    CALLED.clear()
    usual = {"train__steps": 2, "measure__callbacks": [f"{__name__}:Everywhere"]}
    train(small_config(**{**usual, **changes}), root)
    return list(CALLED)


def wrong_hooks(root: Path) -> Iterator[str]:
    """Order of hooks over a run and a resumed one, and what they cost a step."""
    every = {"ckpt__policy": CkptPolicy.last, "ckpt__every": 1}
    found = called(root / "run", **every)
    wanted = ["begin 0", *step_of(1), "checkpoint 1", *step_of(2), "checkpoint 2", "end done", "close"]
    if found != wanted:
        yield f"{found}"
    line = read_metrics(root / "run" / "metrics.jsonl")[-1]
    if line["step_time_s"] > HOOK_S:
        yield f"hooks of {HOOK_S} s count: {line['step_time_s']} s"
    if (found := called(root / "run", **every, train__steps=3))[:2] != ["begin 2", "before 3 4"]:
        yield f"resumed: {found}"
    with pytest.raises(RuntimeError, match="stop here"):
        called(root / "broken", train__seed=1)
    if CALLED[-2:] != ["step 1 1", "close"]:
        yield f"after an error: {CALLED[-2:]}"


test_a_mutant_is_found = finds(
    "own classes",
    wrong_hooks=r"""
        too late: A hook before the step is called within it
            train.loop.Loop._watch: call("before", step, microbatches)\n    self.callbacks.watch(step, watches)
            => watch(step, watches)\n    self.callbacks.call("before", step, microbatches)
        time of hooks: A hook's time counts
            train.callbacks.Callbacks.reduced: self._meters.timers.aside() => nullcontext()
        left open: Callbacks are not closed
            train.loop.Loop.run: self.callbacks.close() => pass
        a checkpoint unheard of: It is not told
            train.loop.Loop._save_if_due: self.callbacks.call("checkpoint", step) =>
        a bare number: A callback's bare number is dropped without a word
            train.callbacks.Callbacks.step: {} if found is None => {} if not found
            test_numbers_are_joined_by_name()
    """,
)
