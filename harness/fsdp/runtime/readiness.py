"""When a unit's backward is over: what autograd will still bring to it in the backward that runs.

At the beginning of a backward autograd knows every node it will run. A unit is over when its parameters among them have
their gradients, and when the backward has passed the inputs of its calls among them (seen by an identity inserted
there, which autograd runs after everything else in the call; frozen weights are needed until then). So a unit may be
called many times, a graph used twice, a parameter used outside its unit's forward, and half a unit not at all.

An identity can stand on tensors that are arguments, and not on those in a list, an object or a closure. Where a call
has none, autograd's own order tells when it has been passed: of the nodes that wait for nothing more it runs the newest
first. So when a node begins to run, all that this backward runs of the calls begun after it was made has run.

Reentrant activation checkpointing runs the forward without gradients and later records and differentiates it inside the
backward: the outer graph holds none of its nodes. Such calls are counted, and a unit waits until each was computed
again and brought a gradient to every parameter, or until the backward ends.

A unit of which autograd knows nothing may still get gradients that way, but only from a call in a forward that this
backward goes through. Calls in other ones (an evaluation, a loss that was given up or has a backward of its own) do not
count: a rank that waits for what never comes holds up ranks that use other units. Where no call that autograd knows
tells which forwards those are, the forward is taken whose output the backward came to first; or, where a call without
gradients may be computed again, all count.

A unit computes with aliases of its inputs, whose history begins at the engine's node. They share storage and version
counter, so that an edit in place (`F.relu_(x)`) would change the caller's tensor and not its history: it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.storage.parameter_access import HOME, by_engine
from harness.private_torch import running_node, will_run

NUMBERS = count()
"""Moments of the forward: begins of calls, and ends."""


class PassedInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        ctx.set_materialize_grads(False)  # an input without a gradient must not get a zero one
        return tuple([each.detach() for each in inputs])  # torch would not say which unit edits what it gets as it is

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notify()
        return (None, *gradients)


class Call:
    """One call of a unit. forward: number of the model's forward, 0 outside."""

    def __init__(self, forward: int) -> None:
        self.forward = forward
        self.begin = next(NUMBERS)
        self.inputs: Sequence[Tensor] = ()  # aliases of what has gradients, while its forward runs
        self.identity: Callable[[], Any] = lambda: None  # node on the inputs, as long as its graph lives


class Readiness:
    """One unit's calls since the last backward, and what is still to come to it in the one that runs."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.running: list[Call] = []  # whose forward runs, the innermost last
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # with an identity, which alone keeps them
        self.is_blind = False  # of some call neither inputs nor outputs could be seen
        self.post_backward()

    def post_backward(self) -> None:
        self.trained = self.params
        self.due: set[Call] = set()
        self._due_params: set[int] = set()
        self.inside: set[Call] = set()  # entered, and not known to be passed
        self._arrived: set[int] = set()
        self.hidden_calls = 0  # under no_grad inside a forward with gradients
        self._called_in: set[int] = set()  # numbers of forwards; 0: in none
        self._is_reached = False
        self.is_called = False  # by a forward of this backward, as far as is known
        self.is_due_once = True  # this backward comes to at most one call

    # -- calls -----------------------------------------------------------------------------------------------------

    def begin_call(self, *, hidden: bool, forward: int) -> Call:
        self._called_in.add(forward)
        self.hidden_calls += hidden
        call = Call(forward)
        self.running.append(call)
        return call

    def watch(self, call: Call, node: Any) -> None:
        call.identity = weakref.ref(node)
        self._calls.add(call)

    def note_recomputation(self) -> bool:
        """True if a backward inside the backward is to follow."""
        if not self.hidden_calls:
            return False
        self.hidden_calls -= 1
        self._arrived.clear()
        return True

    # -- the backward that runs ------------------------------------------------------------------------------------

    def pre_backward(self, trained: Sequence[nn.Parameter], due: Set[int]) -> None:
        """A backward begins. trained: parameters that are not frozen. due: ids of those that get a gradient."""
        nodes = [(call, call.identity()) for call in self._calls]
        self.due = {call for call, node in nodes if node is not None and will_run(node)}
        self.trained = trained
        self._due_params = {id(param) for param in trained} & due
        self._is_reached = bool(self.due or self._due_params)
        self.is_due_once = len(self.due) <= 1

    def note_forwards(self, numbers: Set[int]) -> None:
        """Forwards that this backward goes through; empty: unknown."""
        self.is_called = bool(self._called_in & {*numbers, 0} if numbers else self._called_in)

    def note_passed(self, call: Call) -> None:
        self.due.discard(call)
        self.inside.discard(call)

    def pass_to(self, moment: int) -> bool:
        """A node made at this moment runs. Returns False if some call's end is still told by the order alone."""
        self.inside = {call for call in self.inside if call in self.due or call.begin <= moment}
        return self.inside <= self.due

    def note_gradient(self, param: nn.Parameter) -> None:
        self._due_params.discard(id(param))
        self._arrived.add(id(param))

    @property
    def is_passed(self) -> bool:
        return not (self.due or self.inside or self.is_blind)

    @property
    def is_due(self) -> bool:
        """True if autograd will bring a gradient to a parameter of the unit."""
        return bool(self._due_params)

    @property
    def is_unused(self) -> bool:
        return not self._is_reached and not self.is_called

    @property
    def is_over(self) -> bool:
        if self.hidden_calls or self.due or self.inside or self._due_params:
            return False
        return self._is_reached or len(self._arrived) == len(self.trained)


@by_engine
def begin_backward(units: Sequence[Readiness], forward: int = 0) -> None:
    """Ask autograd what it will reach in these units; inside a hook of the backward.

    forward: number of the model's forward, if the hook stands on its outputs. Raises RuntimeError: see `due_among`.
    """
    trained = [[param for param in unit.params if param.requires_grad] for unit in units]
    due = {id(param) for param in due_among([param for of_unit in trained for param in of_unit])}
    for unit, of_unit in zip(units, trained, strict=True):
        unit.pre_backward(of_unit, due)
    forwards = {call.forward for unit in units for call in unit.due}
    if not forwards and forward and not any(unit.hidden_calls for unit in units):
        forwards = {forward}  # in which this rank uses no unit, most likely
    for unit in units:
        unit.note_forwards(forwards)


class _Above(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        return torch.empty(())


def due_among(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters to which the running backward will bring a gradient. Raises RuntimeError: torch.autograd.grad() was
    asked for one of them."""
    if not params:
        return []
    with torch.enable_grad():
        above = _Above.apply(*params)  # type: ignore[no-untyped-call] # torch leaves it unannotated
    return [
        param for param, (node, _) in zip(params, above.grad_fn.next_functions, strict=True) if _will_come(param, node)
    ]


def _will_come(param: nn.Parameter, node: Any) -> bool:
    try:
        return bool(will_run(node))
    except RuntimeError as error:  # what torch says of a leaf that autograd.grad was asked for
        raise RuntimeError(
            f"torch.autograd.grad() was asked for the gradient of {getattr(param, HOME, ('a parameter',))[0]}, and"
            " would give what comes of this rank's data alone, past the reduction. Call loss.backward() and read"
            " parameter.grad; torch.autograd.grad() of inputs is right as it is"
        ) from error


def could_reach(params: Set[int]) -> bool:
    """True if the graph below the running node holds one of these parameters."""
    todo: list[Any] = [running_node()]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in params:
            return True
        todo += [each for each, _ in node.next_functions]
    return False
