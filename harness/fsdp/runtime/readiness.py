"""When a unit's backward is over: what autograd will still bring to it in the backward that runs.

[Note: The due set] At the beginning of a backward autograd knows every node it will run. A unit is over when its
parameters among them have their gradients, and when the backward has passed the inputs of its calls among them (seen by
an identity inserted there, which autograd runs after everything else in the call; frozen weights are needed until
then). So a unit may be called many times, a graph used twice, a parameter used outside its unit's forward, and half a
unit not at all. Whatever the units do, reductions leave in the static order of `harness.fsdp.runtime.reduce`.

[Note: Backwards inside a backward] Reentrant activation checkpointing runs the forward without gradients and later
records and differentiates it inside the backward: the outer graph holds none of its nodes. Such calls are counted, and
a unit waits until each was computed again and brought a gradient to every parameter, or until the backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from harness.fsdp.storage.parameter_access import by_engine


class Readiness:
    """What one unit waits for.

    Args:
        params: its parameters that get gradients.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self._calls: WeakSet[Any] = WeakSet()  # identities on the inputs, as long as their graphs live
        self._due_params: set[int] = set()
        self._due_calls: set[Any] = set()
        self._arrived: set[int] = set()
        self._hidden_calls = 0
        self._was_called = False
        self._is_reached = False

    def note_call(self, *, hidden: bool) -> None:
        """The unit's forward runs; hidden: without gradients, in a forward of the model that has them."""
        self._was_called = True
        self._hidden_calls += hidden

    def note_recomputation(self) -> None:
        """The unit's forward runs with gradients during a backward."""
        if self._hidden_calls:
            self._hidden_calls -= 1
            self._arrived.clear()

    def watch(self, node: Any) -> None:
        """Expect backwards to pass this identity on the inputs of a call."""
        self._calls.add(node)

    @by_engine
    def pre_backward(self) -> None:
        """A backward begins: ask autograd what of this unit it will reach. Only inside a hook of that backward."""
        self._due_calls = {node for node in self._calls if _will_run(node)}
        self._due_params = {id(param) for param in self.params if _will_run(get_gradient_edge(param).node)}
        self._is_reached = bool(self._due_calls or self._due_params)

    def post_backward(self) -> None:
        """A backward has ended, or was given up: forget it, and the unit's calls before it."""
        self._due_calls, self._due_params = set(), set()
        self._arrived.clear()
        self._hidden_calls = 0
        self._was_called = self._is_reached = False

    def note_passed(self, node: Any) -> None:
        """The backward has passed the inputs of a call."""
        self._due_calls.discard(node)

    def note_gradient(self, param: nn.Parameter) -> None:
        """A parameter has its gradient."""
        self._due_params.discard(id(param))
        self._arrived.add(id(param))

    def note_written(self, param: nn.Parameter) -> None:
        """A kernel adds the gradient of a parameter by itself, before the backward has passed the call it is in.

        Where no inputs of a call tell when that is, the unit is over with the whole backward.
        """
        if self._due_calls:
            self._due_params.discard(id(param))
            self._arrived.add(id(param))

    @property
    def is_unused(self) -> bool:
        """Whether no gradient can come: not reached, and not called where autograd does not look."""
        return not self._is_reached and not self._was_called

    @property
    def is_over(self) -> bool:
        """Whether everything that was due has come."""
        if self._hidden_calls:
            return False
        if self._is_reached:
            return not self._due_params and not self._due_calls
        return len(self._arrived) == len(self.params)


def _will_run(node: Any) -> bool:
    """Whether the backward that runs will run this node as a step of its own.

    A leaf that autograd.grad was asked for is none: its gradient goes to the caller, not to the parameter.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch says of such a leaf
        return False
