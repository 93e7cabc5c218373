"""Where the model's forward is, and which units' forwards the program is in."""

from __future__ import annotations

from enum import Enum

from harness.fsdp.runtime.readiness import next_number
from harness.fsdp.runtime.state_machine import StateMachine
from harness.fsdp.runtime.step import Call, StepError


class ForwardState(Enum):
    """Where the model's own forward is."""

    IDLE = "outside"
    FORWARD = "inside"
    RAISED = "it raised, and left weights unsharded"


FORWARD_TRANSITIONS = {
    ForwardState.IDLE: {Call.pre_forward: (ForwardState.FORWARD,)},
    ForwardState.FORWARD: {Call.post_forward: (ForwardState.IDLE,), Call.fail: (ForwardState.RAISED,)},
    ForwardState.RAISED: {Call.pre_forward: (ForwardState.FORWARD,)},
}


class Forward(StateMachine[ForwardState, Call]):
    """The model's forward, and the units in whose forward the program is. Recomputations in a backward are left out.

    Args:
        root: name of the root unit.
    """

    state = ForwardState.IDLE
    transitions = FORWARD_TRANSITIONS
    refusals = {}  # noqa: RUF012 # none that a user could make
    error = StepError

    def __init__(self, root: str) -> None:
        self.root = root
        self.running: set[str] = set()
        """Units in whose forward the program is."""
        self.with_gradients = False
        """Whether the model's forward was called with gradients on."""
        self._begin = 0
        self._number = 0
        self.depth = 0
        """How many forwards of the model run inside the outermost one."""

    @property
    def in_model(self) -> bool:
        """Whether the program is in the model's forward, or in a method that stands for it."""
        return self.root in self.running

    def pre_forward(self, *, with_gradients: bool) -> None:
        """The model's forward begins."""
        self.move(Call.pre_forward)
        self.running, self.with_gradients = {self.root}, with_gradients
        self.depth = 0
        self._begin = next_number()
        self._number += 1

    @property
    def number(self) -> int:
        """Which forward of the model the program is in, counted from 1; 0: in none."""
        return self._number if self.state is ForwardState.FORWARD else 0

    @property
    def made_nodes(self) -> bool:
        """Whether the model's forward has made something that a backward could go through."""
        return self.with_gradients and next_number() > self._begin

    def post_forward(self) -> None:
        """The model's forward came to its end."""
        self.move(Call.post_forward)

    def left(self, unit: str) -> None:
        """A unit's forward is over, also by an exception; the root's is the model's."""
        if unit == self.root and self.depth:
            self.depth -= 1
            return
        self.running.discard(unit)
        if unit == self.root and self.state is ForwardState.FORWARD:
            self.move(Call.fail)

    def hides(self, *, with_gradients: bool) -> bool:
        """Whether a unit called now is recorded only in the backward, as reentrant checkpointing does."""
        return self.state is ForwardState.FORWARD and self.with_gradients and not with_gradients
