"""Where the model's forward is, and which units' forwards the program is in."""

from __future__ import annotations

from enum import Enum

from harness.fsdp.runtime.state_machine import StateMachine
from harness.fsdp.runtime.step import Call, StepError
from harness.private_torch import next_number


class ForwardState(Enum):
    IDLE = "outside"
    FORWARD = "inside"
    RAISED = "it raised, and left weights unsharded"


FORWARD_TRANSITIONS = {
    ForwardState.IDLE: {Call.pre_forward: (ForwardState.FORWARD,)},
    ForwardState.FORWARD: {Call.post_forward: (ForwardState.IDLE,), Call.fail: (ForwardState.RAISED,)},
    ForwardState.RAISED: {Call.pre_forward: (ForwardState.FORWARD,)},
}


class Forward(StateMachine[ForwardState, Call]):
    """The model's forward, and units whose forward runs; recomputation in a backward does not count."""

    state = ForwardState.IDLE
    transitions = FORWARD_TRANSITIONS
    refusals = {}  # noqa: RUF012 # none that a user could make
    error = StepError

    def __init__(self, root: str) -> None:
        self.root = root
        self.running: set[str] = set()
        self.with_gradients = False
        self._begin = 0
        self._number = 0
        self.depth = 0

    @property
    def in_model(self) -> bool:
        """True also inside a method run by `run_as_forward`."""
        return self.root in self.running

    def pre_forward(self, *, with_gradients: bool) -> None:
        self.move(Call.pre_forward)
        self.running, self.with_gradients = {self.root}, with_gradients
        self.depth = 0
        self._begin = next_number()
        self._number += 1

    @property
    def number(self) -> int:
        """Number of the running forward, from 1; 0 outside."""
        return self._number if self.state is ForwardState.FORWARD else 0

    @property
    def made_nodes(self) -> bool:
        """True if the forward made nodes that a backward could go through."""
        return self.with_gradients and next_number() > self._begin

    def post_forward(self) -> None:
        self.move(Call.post_forward)

    def left(self, unit: str) -> None:
        if unit == self.root and self.depth:
            self.depth -= 1
            return
        self.running.discard(unit)
        if unit == self.root and self.state is ForwardState.FORWARD:
            self.move(Call.fail)

    def hides(self, *, with_gradients: bool) -> bool:
        """True under reentrant checkpointing: the call is recorded in the backward only."""
        return self.state is ForwardState.FORWARD and self.with_gradients and not with_gradients
