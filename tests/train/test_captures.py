"""Captured steps: what is written of them, and that others pay nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.protocol import Microbatch
from harness.store.metrics import read_metrics
from tests.support.factory import small_config, train
from tests.train.runs import described

HOOKS = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks")


def hooks_of(model: torch.nn.Module) -> int:
    return sum(
        len(getattr(each, kind, None) or ()) for each in [*model.modules(), *model.parameters()] for kind in HOOKS
    )


def test_a_step_that_is_not_captured_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook, no look at the engine, no file; in a run that captures a step, only that step has any."""
    counts: dict[bool, list[int]] = {True: [], False: []}
    asked: list[str] = []
    captures = False

    def watch(engine: Any) -> Any:
        inner, seen, gradients = engine.forward_backward, engine.seen, engine.named_gradients

        def forward_backward(batch: Microbatch, *, last: bool) -> Tensor:
            counts[captures].append(hooks_of(engine.model))
            loss: Tensor = inner(batch, last=last)
            return loss

        monkeypatch.setattr(engine, "forward_backward", forward_backward)
        monkeypatch.setattr(engine, "seen", lambda: asked.append("seen") or seen())
        monkeypatch.setattr(engine, "named_gradients", lambda: asked.append("gradients") or gradients())
        return engine

    base = small_config(measure__capture_steps=[], train__global_batch_size=2)
    train(base, tmp_path / "off", wrap_engine=watch)
    assert asked == []
    assert not (tmp_path / "off" / "capture").exists()
    captures = True
    base.measure.capture_steps = [2]
    train(base, tmp_path / "on", wrap_engine=watch)
    assert asked == ["seen", "gradients"]
    first, second, third = counts[True]
    assert first == third == counts[False][0]
    assert counts[False] == [first] * 3
    assert second > first
    on, off = (read_metrics(tmp_path / which / "metrics.jsonl") for which in ("on", "off"))
    assert [list(record) for record in on] == [list(record) for record in off]
    assert [record["loss"] for record in on] == [record["loss"] for record in off]


def test_captures_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    train(small_config(train__steps=1, measure__capture_limit_mib=0), tmp_path)
    assert not (tmp_path / "capture").exists()


def poisoned(gradient: Tensor) -> Tensor:
    return gradient * math.nan


def test_a_witness_of_a_diverged_step_is_written(tmp_path: Path) -> None:
    """An engine that can be looked at, and a local gradient that is nan."""

    def poison(engine: Any) -> Any:
        engine.weights["head.norm.weight"].register_hook(poisoned)
        return engine

    train(small_config(measure__capture_steps=[1], train__steps=1), tmp_path, wrap_engine=poison)
    facts = described(tmp_path / "capture/step-000001.safetensors")
    assert facts["terms"]["head.norm.weight"] == "nan"
    assert math.isfinite(facts["terms"]["embedding.weight"])
