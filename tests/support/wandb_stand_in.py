"""What the copy calls of wandb, in this process and without its service: it takes what wandb takes, and is quick.

For fuzzers, which ask for thousands of runs. What its messages cannot hold is an error here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from wandb.sdk import wandb_init, wandb_run

_NUMBERS = count()
STEPS = "steps.json"
"""In a run's folder: the steps that it was sent."""


class StandIn:
    """A run."""

    def __init__(self, **said: Any) -> None:
        inspect.signature(wandb_init.init).bind(**said)  # the installed one's: it refuses what that refuses
        _message({key: value for key, value in said.items() if key != "settings"})
        assert 0 < len(said["id"]) <= 64
        assert all(0 < len(tag) <= 64 for tag in said["tags"])
        self.entity, self.summary, self.steps = "", _Summary(), [-1]
        self._home = Path(said["dir"], "wandb", f"offline-run-{next(_NUMBERS)}-{said['id']}")
        self.dir = str(self._home / "files")
        Path(self.dir).mkdir(parents=True)

    def define_metric(self, name: str, **said: object) -> None:
        """Only whether the installed one takes it."""
        inspect.signature(wandb_run.Run.define_metric).bind(self, name, **said)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Take a line."""
        _message(dict(values))
        if step is not None:
            assert step < 2**63, "no number of a message"
            self.steps += [step] * (step > self.steps[-1])  # the others it drops, with a warning

    def mark_preempting(self) -> None:
        """Nothing to do."""

    def log_artifact(self, artifact: object) -> None:
        """Nothing to do."""

    def finish(self, exit_code: int = 0) -> None:
        """Write down what was sent."""
        (self._home / STEPS).write_text(json.dumps(self.steps[1:]))


class _Summary(dict[str, Any]):
    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override] # narrower than dict's, as wandb's is
        _message(dict(values))
        super().update(values)


class Table:
    """A table: rows of one length."""

    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in data)
        _message(data)


def _message(value: Any) -> None:
    """Raises where a message of wandb cannot hold it."""
    json.dumps(value, default=lambda each: None if isinstance(each, Table) else _refuse(each)).encode("utf-8")
    for text in _texts(value):
        text.encode("utf-8")


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is no JSON")


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, `wandb` is this."""
    import wandb

    for name, stand_in in {"init": StandIn, "teardown": lambda: None, "Table": Table}.items():
        monkeypatch.setattr(wandb, name, stand_in)


def sent(run: Path) -> list[list[int]]:
    """The steps of each run that was sent from this folder."""
    return [json.loads(path.read_text()) for path in sorted(run.glob(f"wandb/offline-run-*/{STEPS}"))]
