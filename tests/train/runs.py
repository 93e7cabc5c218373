"""What tests of the loop read of a run that ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.parity.tensors import read_header
from harness.store.metrics import read_metrics


class Passing:
    """Stands before an engine and passes everything on, for tests that change one thing."""

    number = 1
    """Step that the engine is at."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self, lr: float) -> float:
        norm: float = self.engine.step(lr)
        self.number += 1
        return norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def summary(run_dir: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return value


def assert_same_run(a: Path, b: Path) -> None:
    for first, second in zip(read_metrics(a / "metrics.jsonl"), read_metrics(b / "metrics.jsonl"), strict=True):
        for key in ("step", "loss", "grad_norm", "param_norm", "lr", "data_digest"):
            assert first[key] == second[key], key
    for key in ("initial_weights", "final_weights", "tokens"):
        assert summary(a)[key] == summary(b)[key], key


def described(path: Path) -> dict[str, Any]:
    """Description of a captured step."""
    facts: dict[str, Any] = json.loads(read_header(path)[1]["harness"])
    return facts
