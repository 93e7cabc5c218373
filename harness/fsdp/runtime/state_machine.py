"""A state that changes as a table allows, and a sentence for every call that the table does not have."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Called = TypeVar("Called", bound=Enum)

Table = Mapping[State, Mapping[Called, tuple[State, ...]]]


class StateMachine(Generic[State, Called]):
    """Moves between states by calls. Subclasses set the four attributes."""

    state: State
    transitions: Table[State, Called]
    refusals: Mapping[tuple[State, Called], str]
    error: type[RuntimeError] = RuntimeError

    def check(self, call: Called) -> tuple[State, ...]:
        """States that a call may lead to now; raises `error` if none."""
        allowed = self.transitions[self.state].get(call)
        if allowed is None:
            raise self.error(self.refusal(call))
        return allowed

    def refusal(self, call: Called) -> str:
        possible = ", ".join(str(each.value) for each in self.transitions[self.state])
        told = self.refusals.get((self.state, call))
        return told or f"{call.value} is not possible now ({self.state.value}); possible is: {possible}"

    def move(self, call: Called, to: State | None = None) -> None:
        """Change the state. to: None where the call leads to one state only. Raises `error` otherwise."""
        allowed = self.transitions[self.state].get(call) or self.check(call)
        if to is None:
            (to,) = allowed
        elif to not in allowed:
            raise self.error(f"{call.value} does not lead from {self.state.name} to {to.name}")
        self.state = to
