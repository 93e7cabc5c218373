"""What callbacks of a user's own return: numbers by name are recorded, anything else is refused with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.train.callbacks import Callback, Callbacks
from tests.support.mutants import kills

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
    return Callbacks(config).step(1, {}, None)  # type: ignore[arg-type] # nothing here looks at the engine


def test_numbers_of_python_and_numpy_are_joined() -> None:
    found = joined({"a": np.float32(0.5), "n": np.int64(3), "x": float("nan")}, {"b": 1})
    assert {name: type(value) for name, value in found.items()} == {"a": float, "n": int, "x": float, "b": int}
    assert (found["a"], found["n"], found["b"]) == (0.5, 3, 1)
    assert joined(None, {}) == {}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"acc": {"top1": 0.5}}, r"First returns acc=\{'top1': 0.5\}, which is not a number$"),
        ({"acc": torch.tensor(0.5)}, r"acc=tensor\(0.5000\), which is not a number: call .item\(\)"),
        ({"acc": True}, "acc=True, which is not a number"),
        ({"acc": "0.5"}, "acc='0.5', which is not a number"),
        (0.0, "First.step returns 0.0: return a dict of numbers by name, or None"),
        ([], r"First.step returns \[\]"),
    ],
)
def test_anything_else_is_refused(returned: Any, said: str) -> None:
    """0.0 and an empty list were taken for nothing, 0.5 ended in an AttributeError, np.float32 was called no number."""
    with pytest.raises(ValueError, match=said):
        joined(returned)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Second returns 'a', which another callback returns too"):
        joined({"a": 1}, {"a": 2})


@kills("own classes", "a bare number", "A callback's bare number is dropped without a word")
def test_a_bare_number_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.train.callbacks.Mapping", object)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_anything_else_is_refused([], r"First.step returns \[\]")
