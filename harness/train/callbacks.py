"""What a user adds to the loop: a class that sees every step, and whose numbers are recorded beside the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from harness.config.schema import Config
from harness.engines.protocol import Engine


class Callback(ABC):
    """One on each rank. All ranks call every method in the same order, so that what is collective may be called in it.

    Nothing it does is timed or counted. It keeps no state over an interruption: what it returns must follow from the
    step, or a resumed run is told apart from one that was not.
    """

    def __init__(self, config: Config) -> None:
        """Made before the first step, of the whole configuration."""
        self.config = config

    @abstractmethod
    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> Mapping[str, float] | None:
        """After an update: the step's number, its line of the record, and the engine with the new weights.

        What rank 0 returns is recorded under `own`, by these names.
        """

    def end(self, status: str, engine: Engine) -> None:  # noqa: B027 - most have nothing to do
        """After the last step; status is done or preempted."""


class Callbacks:
    """All of a run's, in the order they were named."""

    def __init__(self, config: Config) -> None:
        self.each: Sequence[Callback] = [_class_of(name)(config) for name in config.measure.callbacks]

    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> dict[str, float]:
        """What all return of a step, joined.

        Raises:
            ValueError: two return a number of one name, or one returns what is no number.
        """
        joined: dict[str, float] = {}
        for each in self.each:
            for name, value in (each.step(step, record, engine) or {}).items():
                if name in joined or isinstance(value, bool) or not isinstance(value, int | float):
                    what = "a second time" if name in joined else f"as {value!r}, which is no number"
                    raise ValueError(f"measure.callbacks: {type(each).__name__} returns {name} {what}")
                joined[name] = value
        return joined

    def end(self, status: str, engine: Engine) -> None:
        """Tell all that the last step is done."""
        for each in self.each:
            each.end(status, engine)


def _class_of(name: str) -> type[Callback]:
    module, _, attribute = name.partition(":")
    found: type[Callback] = getattr(import_module(module), attribute)
    return found
