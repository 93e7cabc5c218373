"""A state that changes as a table allows, and a sentence for every call that the table does not have."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Called = TypeVar("Called", bound=Enum)

Table = Mapping[State, Mapping[Called, tuple[State, ...]]]
"""Which states a call may lead to, from each state. One that is not there is refused."""


class StateMachine(Generic[State, Called]):
    """What is in one of a few states, and moves between them by calls. Subclasses give the four values below."""

    state: State
    """The present state; the value in the class is the first one. `move` alone changes it."""
    transitions: Table[State, Called]
    refusals: Mapping[tuple[State, Called], str]
    """What the user is told of a call that has no transition: why it is wrong, and which call is missing."""
    error: type[RuntimeError] = RuntimeError

    def check(self, call: Called) -> tuple[State, ...]:
        """The states a call may lead to now.

        Raises:
            RuntimeError: none; why, and which call is missing. Of the class `error`.
        """
        allowed = self.transitions[self.state].get(call)
        if allowed is None:
            raise self.error(self.refusal(call))
        return allowed

    def refusal(self, call: Called) -> str:
        """Why a call is wrong now, and which one is missing."""
        possible = ", ".join(str(each.value) for each in self.transitions[self.state])
        told = self.refusals.get((self.state, call))
        return told or f"{call.value} is not possible now ({self.state.value}); possible is: {possible}"

    def move(self, call: Called, to: State | None = None) -> None:
        """Go where a call leads.

        Args:
            to: which of the states that it may lead to; None where there is one only.

        Raises:
            RuntimeError: the call is not allowed now, or does not lead there. Of the class `error`.
        """
        allowed = self.transitions[self.state].get(call) or self.check(call)
        if to is None:
            (to,) = allowed
        elif to not in allowed:
            raise self.error(f"{call.value} does not lead from {self.state.name} to {to.name}")
        self.state = to
