"""A user's own class that is called at every step, with its numbers in the record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from typing import Any

from harness.config.schema import Config
from harness.engines.protocol import Engine


class Callback(ABC):
    """One object on each rank. All ranks call every method in the same order, so that methods may call collectives.

    Its time and its collectives are not counted. Its state is not saved: results must follow from the step alone, or a
    resumed run differs from an uninterrupted one.
    """

    def __init__(self, config: Config) -> None:
        """Called before the first step, with the entire configuration."""
        self.config = config

    @abstractmethod
    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> Mapping[str, float] | None:
        """Called after an update, with the step's number, its line of the record, and the engine with the new weights.

        Returns numbers by name, or None. Those of rank 0 are recorded under `own`.
        """

    def end(self, status: str, engine: Engine) -> None:  # noqa: B027 - most have nothing to do
        """Called after the last step; status is done or preempted."""


class Callbacks:
    def __init__(self, config: Config) -> None:
        self.each: Sequence[Callback] = [_class_of(name)(config) for name in config.measure.callbacks]

    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> dict[str, float]:
        """Joined numbers of a step.

        Raises `ValueError`: a duplicate name, or a result that is no mapping of names to numbers.
        """
        joined: dict[str, float] = {}
        for each in self.each:
            who, found = f"measure.callbacks: {type(each).__name__}", each.step(step, record, engine)
            if found is not None and not isinstance(found, Mapping):
                raise ValueError(f"{who}.step returns {found!r}: return a dict of numbers by name, or None")
            for name, value in (found or {}).items():
                if name in joined:
                    raise ValueError(f"{who} returns {name!r}, which another callback returns too")
                joined[name] = _number(who, name, value)
        return joined

    def end(self, status: str, engine: Engine) -> None:
        for each in self.each:
            each.end(status, engine)


def _number(who: str, name: str, value: Any) -> float:
    """A finite JSON number from Python's or numpy's. Raises `ValueError`: it is neither."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fix = ": call .item()" if hasattr(value, "item") else ""
        raise ValueError(f"{who} returns {name}={value!r}, which is not a number{fix}")
    return int(value) if isinstance(value, Integral) else float(value)


def _class_of(name: str) -> type[Callback]:
    module, _, attribute = name.partition(":")
    found: type[Callback] = getattr(import_module(module), attribute)
    return found
