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

from harness.fsdp.storage.parameter_access import HOME, by_engine
from harness.private_torch import next_number, will_run


@dataclass(frozen=True)
class Call:
    """One call of a unit.

    begin: sequence number of its first node. identity: returns the node on its inputs while the graph lives.
    forward: number of the model's forward, 0 outside.
    """

    begin: int
    identity: Callable[[], Any]
    forward: int = 0

    @property
    def is_unseen(self) -> bool:
        """True if the call made nodes and no hook stands on its inputs."""
        return self.identity() is None and next_number() > self.begin


def _nothing() -> None: ...


class Readiness:
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.trained = params
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
        """Numbers of the forwards, since the last backward, in which the unit was called; 0: in none."""
        self._is_reached = False
        self.is_called = False
        """True if a forward of this backward called the unit, as far as is known."""
        self.is_due_once = True
        """True if this backward comes to at most one call of the unit."""

    def note_call(self, *, hidden: bool, forward: int) -> None:
        """The unit's forward runs. hidden: under no_grad inside a forward with gradients."""
        self._called_in.add(forward)
        self._hidden_calls += hidden

    def note_recomputation(self) -> None:
        if self._hidden_calls:
            self._hidden_calls -= 1
            self._arrived.clear()

    def begin_call(self, identity: Any = None, forward: int = 0) -> None:
        self._running.append(Call(next_number(), _nothing if identity is None else ref(identity), forward))
        if identity is not None:
            self._calls[identity] = self.call

    def end_call(self) -> None:
        if self._running:
            self._running.pop()

    def note_unseen(self) -> None:
        """The running call has hooks neither on inputs nor on outputs."""
        self._unseen.add(self.call.begin)

    def forget_unseen(self) -> None:
        """After an update no backward may reach calls without hooks."""
        self._unseen.clear()

    @property
    def call(self) -> Call:
        return self._running[-1]

    def pre_backward(self, trained: Sequence[nn.Parameter], due: Set[int]) -> None:
        """A backward begins. trained: parameters that are not frozen. due: ids of those that get a gradient."""
        self._due_calls = {node for node in self._calls if _will_run(node)}
        self.trained = trained
        self._due_params = {id(param) for param in trained} & due
        self._is_reached = bool(self._due_calls or self._due_params)
        self.is_due_once = len(self._due_calls) + len(self._unseen) <= 1

    def note_forwards(self, numbers: Set[int]) -> None:
        """Forwards that this backward goes through; empty: unknown. See [Note: Forwards of a backward]."""
        self.is_called = bool(self._called_in & numbers or 0 in self._called_in) if numbers else bool(self._called_in)

    def post_backward(self) -> None:
        self._entered.clear()
        self._inside.clear()
        self._due_calls, self._due_params = set(), set()
        self._arrived.clear()
        self._hidden_calls = 0
        self._called_in.clear()
        self._is_reached = self.is_called = False

    def enter(self, call: Call) -> None:
        identity = call.identity()
        if identity in self._due_calls:
            self._inside.add(identity)
        else:
            self._entered.add(call.begin)

    @property
    def is_entered(self) -> bool:
        """True inside a call whose end only the order of nodes tells."""
        return bool(self._entered)

    @property
    def is_resting(self) -> bool:
        """True if the backward is inside no call of the unit."""
        return not self._entered and not self._inside

    @property
    def is_passed(self) -> bool:
        return not self._due_calls and not self._entered and not self._unseen

    def pass_to(self, number: int) -> None:
        self._entered = {begin for begin in self._entered if begin <= number}

    def note_passed(self, node: Any) -> None:
        self._due_calls.discard(node)
        self._inside.discard(node)

    def note_gradient(self, param: nn.Parameter, number: int) -> bool:
        """A gradient has come. Without hooks it may be of any call not yet passed. Returns `is_entered`."""
        self._due_params.discard(id(param))
        self._arrived.add(id(param))
        if self._unseen:
            self._entered |= {begin for begin in self._unseen if begin <= number}
        return bool(self._entered)

    def note_written(self, param: nn.Parameter) -> None:
        """A kernel adds the gradient itself, before the backward has passed the call.

        Without a node on the inputs the unit ends with the whole backward.
        """
        if self._due_calls:
            self._due_params.discard(id(param))
            self._arrived.add(id(param))

    @property
    def due_numbers(self) -> list[int]:
        return [self._calls[identity].begin for identity in self._due_calls]

    @property
    def is_due(self) -> bool:
        """True if autograd will bring a gradient to a parameter of the unit."""
        return bool(self._due_params)

    @property
    def has_hidden_calls(self) -> bool:
        """True if the unit was called under no_grad inside a forward with gradients."""
        return self._hidden_calls > 0

    @property
    def is_unused(self) -> bool:
        """True if no gradient can come."""
        return not self._is_reached and not self.is_called

    @property
    def is_over(self) -> bool:
        """True if all that was due has come."""
        if self._hidden_calls or self._entered:
            return False
        if self._is_reached:
            return not self._due_params and not self._due_calls
        return len(self._arrived) == len(self.trained)


@by_engine
def begin_backward(units: Sequence[Readiness], forward: int = 0) -> None:
    """Ask autograd what it will reach in these units; inside a hook of the backward.

    forward: number of the model's forward, if the hook stands on its outputs.

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
    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        return torch.empty(())


def due_among(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters to which the running backward will bring a gradient.

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
    try:
        return bool(will_run(node))
    except RuntimeError as error:  # what torch says of a leaf that autograd.grad was asked for
        raise RuntimeError(
            f"torch.autograd.grad() was asked for the gradient of {getattr(param, HOME, ('a parameter',))[0]}, and"
            " would give what comes of this rank's data alone, past the reduction. Call loss.backward() and read"
            " parameter.grad; torch.autograd.grad() of inputs is right as it is"
        ) from error


def _will_run(node: Any) -> bool:
    return bool(will_run(node))
