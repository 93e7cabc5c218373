"""When a unit's backward is over: what autograd will still bring to it in the backward that runs.

[Note: The due set] At the beginning of a backward autograd knows every node it will run. A unit is over when its
parameters among them have their gradients, and when the backward has passed the inputs of its calls among them (seen by
an identity inserted there, which autograd runs after everything else in the call; frozen weights are needed until
then). So a unit may be called many times, a graph used twice, a parameter used outside its unit's forward, and half a
unit not at all. Whatever the units do, reductions leave in the static order of `harness.fsdp.runtime.reduce`.

[Note: Sequence numbers] An identity can stand on tensors that are arguments, and not on those in a list, an object or a
closure. Where a call has none, autograd's own order tells when it has been passed: a node is numbered when the forward
makes it, it can only wait for nodes of higher numbers, and of those that wait for nothing more the engine runs the one
with the highest number first. So when any node begins to run, every node of a higher number that this backward runs at
all has run. A call is *entered* when the first gradient of its outputs comes, and *passed* when a hook runs for a node
that is older than the call.

[Note: Backwards inside a backward] Reentrant activation checkpointing runs the forward without gradients and later
records and differentiates it inside the backward: the outer graph holds none of its nodes. Such calls are counted, and
a unit waits until each was computed again and brought a gradient to every parameter, or until the backward ends.

[Note: Forwards of a backward] A unit of which autograd knows nothing may still get gradients that way, but only from a
call in a forward that this backward goes through. Calls in other ones (an evaluation, a loss that was given up or has a
backward of its own) do not count: while a rank waits for what never comes, its reductions hold up ranks that use other
units, and these hold up its gathers. Where no call that autograd knows tells which forwards those are, the forward is
taken whose output the backward came to first; or, where a call without gradients may be computed again, all count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr

from harness.fsdp.storage.parameter_access import HOME, by_engine


@dataclass(frozen=True)
class Call:
    """One call of a unit.

    begin: autograd's number of the first node it makes. identity: gives the one on its inputs while its graph lives.
    forward: number of the model's forward it is in, 0 where it is in none.
    """

    begin: int
    identity: Callable[[], Any]
    forward: int = 0

    @property
    def is_unseen(self) -> bool:
        """Whether the call made nodes that a backward could go through, and no hook stands on its inputs."""
        return self.identity() is None and next_number() > self.begin


def next_number() -> int:
    """The number autograd gives to the next node that this thread makes; see [Note: Sequence numbers]."""
    return _get_sequence_nr()


def _nothing() -> None:
    """What a call without an identity refers to."""


class Readiness:
    """What one unit waits for.

    Args:
        params: its parameters that get gradients, unless they are frozen.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.trained = params
        """Parameters of the unit that were not frozen as the last backward began."""
        # identities on the inputs, as long as their graphs live, and their calls
        self._calls: WeakKeyDictionary[Any, Call] = WeakKeyDictionary()
        self._due_params: set[int] = set()
        self._due_calls: set[Any] = set()
        self._running: list[Call] = []
        self._unseen: set[int] = set()  # numbers at which calls without any hook began
        self._inside: set[Any] = set()  # identities of calls that the backward has entered and not passed
        self._entered: set[int] = set()  # numbers at which calls without a due identity began
        self._arrived: set[int] = set()
        self._hidden_calls = 0
        self._called_in: set[int] = set()
        """The model's forwards, since the last backward ended, in which the unit was called; 0: in none of them."""
        self._is_reached = False
        self.is_called = False
        """Whether the unit was called in a forward that this backward goes through, as far as is known."""
        self.is_due_once = True
        """Whether this backward is known to come to one call of the unit at most."""

    def note_call(self, *, hidden: bool, forward: int) -> None:
        """The unit's forward runs, in this forward of the model (0: in none); hidden: without gradients, in one that
        has them."""
        self._called_in.add(forward)
        self._hidden_calls += hidden

    def note_recomputation(self) -> None:
        """The unit's forward runs with gradients during a backward."""
        if self._hidden_calls:
            self._hidden_calls -= 1
            self._arrived.clear()

    def begin_call(self, identity: Any = None, forward: int = 0) -> None:
        """A call begins, to be watched from outside: `identity` stands on its inputs, for backwards to pass. forward:
        of the model, that it is in."""
        self._running.append(Call(next_number(), _nothing if identity is None else ref(identity), forward))
        if identity is not None:
            self._calls[identity] = self.call

    def end_call(self) -> None:
        """The call that began last is over, also by an exception."""
        if self._running:
            self._running.pop()

    def note_unseen(self) -> None:
        """No hook stands on the outputs or the inputs of the call that runs, and a backward may come to it."""
        self._unseen.add(self.call.begin)

    def forget_unseen(self) -> None:
        """Weights have changed: no backward may come any more to the calls that had no hook."""
        self._unseen.clear()

    @property
    def call(self) -> Call:
        """The call that runs."""
        return self._running[-1]

    def pre_backward(self, trained: Sequence[nn.Parameter], due: Set[int]) -> None:
        """A backward begins that reaches what is due: `begin_backward` tells. trained: parameters of this unit that are
        not frozen."""
        self._due_calls = {node for node in self._calls if _will_run(node)}
        self.trained = trained
        self._due_params = {id(param) for param in trained} & due
        self._is_reached = bool(self._due_calls or self._due_params)
        self.is_due_once = len(self._due_calls) + len(self._unseen) <= 1

    def note_forwards(self, numbers: Set[int]) -> None:
        """The backward that begins goes through these forwards of the model; none: nobody knows through which. See
        [Note: Forwards of a backward]."""
        self.is_called = bool(self._called_in & numbers or 0 in self._called_in) if numbers else bool(self._called_in)

    def post_backward(self) -> None:
        """A backward has ended, or was given up: forget it, and the unit's calls before it."""
        self._entered.clear()
        self._inside.clear()
        self._due_calls, self._due_params = set(), set()
        self._arrived.clear()
        self._hidden_calls = 0
        self._called_in.clear()
        self._is_reached = self.is_called = False

    def enter(self, call: Call) -> None:
        """The backward has come to the outputs of a call; where no identity tells when it has passed the inputs, the
        order of nodes does."""
        identity = call.identity()
        if identity in self._due_calls:
            self._inside.add(identity)
        else:
            self._entered.add(call.begin)

    @property
    def is_entered(self) -> bool:
        """Whether the backward is in a call of which only the order of nodes tells when it is over."""
        return bool(self._entered)

    @property
    def is_resting(self) -> bool:
        """Whether the backward is in no call of the unit that it was seen to enter."""
        return not self._entered and not self._inside

    @property
    def is_passed(self) -> bool:
        """Whether the backward has passed every call it was to pass, of those that are known."""
        return not self._due_calls and not self._entered and not self._unseen

    def pass_to(self, number: int) -> None:
        """Every node that this backward runs has run down to this number; see [Note: Sequence numbers]."""
        self._entered = {begin for begin in self._entered if begin <= number}

    def note_passed(self, node: Any) -> None:
        """The backward has passed the inputs of a call."""
        self._due_calls.discard(node)
        self._inside.discard(node)

    def note_gradient(self, param: nn.Parameter, number: int) -> bool:
        """A parameter has its gradient. Nothing may have told of the call it came from: then it may be any that the
        backward, which is at this number, has not passed. Returns `is_entered`."""
        self._due_params.discard(id(param))
        self._arrived.add(id(param))
        if self._unseen:
            self._entered |= {begin for begin in self._unseen if begin <= number}
        return bool(self._entered)

    def note_written(self, param: nn.Parameter) -> None:
        """A kernel adds the gradient of a parameter by itself, before the backward has passed the call it is in.

        Where no inputs of a call tell when that is, the unit is over with the whole backward.
        """
        if self._due_calls:
            self._due_params.discard(id(param))
            self._arrived.add(id(param))

    @property
    def due_numbers(self) -> list[int]:
        """At which numbers the calls began that this backward is still to pass, as far as is known."""
        return [self._calls[identity].begin for identity in self._due_calls]

    @property
    def is_due(self) -> bool:
        """Whether autograd knows, as this backward begins, of a parameter to which it brings a gradient."""
        return bool(self._due_params)

    @property
    def has_hidden_calls(self) -> bool:
        """Whether the unit was called without gradients in a forward of the model that has them."""
        return self._hidden_calls > 0

    @property
    def is_unused(self) -> bool:
        """Whether no gradient can come: not reached, and not called where autograd does not look."""
        return not self._is_reached and not self.is_called

    @property
    def is_over(self) -> bool:
        """Whether everything that was due has come."""
        if self._hidden_calls or self._entered:
            return False
        if self._is_reached:
            return not self._due_params and not self._due_calls
        return len(self._arrived) == len(self.trained)


@by_engine
def begin_backward(units: Sequence[Readiness], forward: int = 0) -> None:
    """A backward begins: ask autograd what of these units it will reach. Only inside a hook of that backward; forward:
    number of the model's, where that hook stands on its outputs.

    Raises:
        RuntimeError: see `due_among`.
    """
    trained = [[param for param in unit.params if param.requires_grad] for unit in units]
    due = {id(param) for param in due_among([param for of_unit in trained for param in of_unit])}
    for unit, of_unit in zip(units, trained, strict=True):
        unit.pre_backward(of_unit, due)
    forwards = {unit._calls[identity].forward for unit in units for identity in unit._due_calls}
    if not forwards and forward and not any(unit.has_hidden_calls for unit in units):
        forwards = {forward}  # in which this rank uses no unit, most likely
    for unit in units:
        unit.note_forwards(forwards)


class _Above(torch.autograd.Function):
    """A node above parameters: its edges lead to the nodes that take in their gradients."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        return torch.empty(())


def due_among(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters, of some that are not frozen, to which the backward that runs will bring a gradient.

    Raises:
        RuntimeError: torch.autograd.grad() was asked for one of them.
    """
    if not params:
        return []
    with torch.enable_grad():
        above = _Above.apply(*params)  # type: ignore[no-untyped-call] # torch leaves it unannotated
    return [
        param for param, (node, _) in zip(params, above.grad_fn.next_functions, strict=True) if _will_come(param, node)
    ]


def _will_come(param: nn.Parameter, node: Any) -> bool:
    """Whether the backward that runs will bring a parameter a gradient, by this node.

    Raises:
        RuntimeError: it would go to whoever called autograd.grad, as it is on this rank.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:  # what torch says of a leaf that autograd.grad was asked for
        raise RuntimeError(
            f"torch.autograd.grad() was asked for the gradient of {getattr(param, HOME, ('a parameter',))[0]}, and"
            " would give what comes of this rank's data alone, past the reduction. Call loss.backward() and read"
            " parameter.grad; torch.autograd.grad() of inputs is right as it is"
        ) from error


def _will_run(node: Any) -> bool:
    """Whether the backward that runs will run this node as a step of its own."""
    return bool(torch._C._will_engine_execute_node(node))
