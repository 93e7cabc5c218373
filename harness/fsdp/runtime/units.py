"""Modules to units with storage: who is gathered, reduced and released together, and who gets which values.

A unit is the outermost module of a listed class. Everything that lies in no unit, or in several (tied weights), belongs
to the root unit, which is gathered before the forward begins and stays until the backward ends. Within a unit,
parameters are apart by compute dtype, by whether they are trained and by whether they are experts': each such set is
one bucket.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from operator import call
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.fsdp.storage.codec import is_marked
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import GroupKey, ParamGroup
from harness.fsdp.storage.parameter_access import HOME, by_engine
from harness.private_torch import running_node, will_run


class WeakHook:
    """Like functools.partial of a bound method, with weak references to the object and to arguments
    `kept_by_engine`, which come first.

    [Note: Who keeps whom] The module keeps the engine, so that a loop which goes on with the module alone still trains.
    The engine keeps units and parameters, and looks at the module itself through a weak reference; hooks, which torch
    keeps with modules, parameters and graphs, look so at the engine. Nothing of it is a cycle: when the program drops
    the `ShardedModel` and the module, every bucket is freed at once, without the garbage collector and without
    `close()`.

    `unit.compile()`, `torch.compile(unit)` and the like take in what a module's call does, its hooks too; collectives
    cannot be traced, so that a graph ends where a hook is called.
    """

    __slots__ = ("_args", "_function", "_owner", "_weak")

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        bound = cast(MethodType, method)
        self._owner = weakref.ref(bound.__self__)
        self._function = bound.__func__
        kept = [each for each in args if getattr(each, "kept_by_engine", False)]
        self._weak = tuple(map(weakref.ref, kept))
        self._args = args[len(kept) :]

    @torch.compiler.disable  # type: ignore[untyped-decorator] # as torch declares it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError when the engine is gone."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                "the sharded model that this module or tensor belonged to is gone: keep the ShardedModel, or the module"
                " that was sharded, as long as its parts and outputs are used"
            )
        return self._function(owner, *map(call, self._weak), *self._args, *args, **kwargs)


NUMBERS = count()  # moments of the forward: begins of calls, and ends


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
    """One call of a unit. forward: number of the model's forward, or of the unit's own."""

    def __init__(self, forward: int) -> None:
        self.forward = forward
        self.begin = next(NUMBERS)
        self.inputs: Sequence[Tensor] = ()  # aliases of what has gradients, while its forward runs
        self.identity: Callable[[], Any] = lambda: None  # node on the inputs, as long as its graph lives


class Readiness:
    """One unit's calls since the last backward, and what is still to come to it in the one that runs.
    At the beginning of a backward autograd knows every node it will run. A unit is over when its parameters among them
    have their gradients, and when the backward has passed the inputs of its calls among them (seen by an identity
    inserted there, which autograd runs after everything else in the call; frozen weights are needed until then). So a
    unit may be called many times, a graph used twice, a parameter used outside its unit's forward, and half a unit not
    at all.

    An identity can stand on tensors that are arguments, and not on those in a list, an object or a closure. Where a
    call has none, autograd's own order tells when it has been passed: of the nodes that wait for nothing more it runs
    the newest first. So when a node begins to run, all that this backward runs of the calls begun after it was made has
    run.

    Reentrant activation checkpointing runs the forward without gradients and later records and differentiates it inside
    the backward: the outer graph holds none of its nodes. Such calls are counted, and a unit waits until each was
    computed again and brought a gradient to every parameter, or until the backward ends.

    A unit of which autograd knows nothing may still get gradients that way, but only from a call in a forward that this
    backward goes through. Calls in other ones (an evaluation, a loss that was given up or has a backward of its own) do
    not count: a rank that waits for what never comes holds up ranks that use other units. Where no call that autograd
    knows tells which forwards those are, the forward is taken whose output the backward came to first; or, where a call
    without gradients may be computed again, all count.

    A unit computes with aliases of its inputs, whose history begins at the engine's node. They share storage and
    version counter, so that an edit in place (`F.relu_(x)`) would change the caller's tensor and not its history: it is
    refused.
    """

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
        self._called_in: set[int] = set()  # numbers of forwards
        self._is_reached = False
        self.is_called = False  # by a forward of this backward, as far as is known
        self.is_due_once = True  # this backward comes to at most one call

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
        self.is_called = bool(self._called_in & numbers if numbers else self._called_in)

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


ROOT = "(root)"
Members = list[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class UnitPlan:
    name: str
    module: nn.Module
    buckets: dict[GroupKey, Members] = field(default_factory=dict)


class Unit:
    """One unit; its index is its place in every order of collectives."""

    kept_by_engine = True

    def __init__(self, name: str, module: nn.Module, buckets: list[ParamGroup]) -> None:
        self.name, self.is_root = name, name == ROOT
        self.buckets = buckets
        self._module = weakref.ref(module)  # see [Note: Who keeps whom]
        # under double_buffer
        self.shares_buffers = not self.is_root and any(bucket.memory.fixed for bucket in buckets)
        self.trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self.gradients = [bucket.gradients for bucket in self.trainable if bucket.gradients is not None]
        self.readiness = Readiness([param for bucket in self.trainable for _, param in bucket.params])

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "an engine does not outlive the module it shards"
        return module

    def receive(self) -> None:
        """Wait for the gather after an update, and show unsharded parameters."""
        for bucket in self.buckets:
            if bucket.awaited:
                bucket.receive()
            bucket.use()


def buckets_of(units: Iterable[Unit]) -> list[ParamGroup]:
    return [bucket for unit in units for bucket in unit.buckets]


def is_expert(param: Tensor) -> bool:
    """Megatron's mark: `param.allreduce` is False; its gradient is reduced over the expert's ranks only."""
    return getattr(param, "allreduce", True) is False


def compiled(module: nn.Module) -> nn.Module:
    """Module inside `torch.compile(module)`. The wrapper is the unit: its hooks run outside compiled code."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and nothing is compiled without it
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return module
    return cast(nn.Module, next(module.children()))


def build_units(
    plans: Sequence[UnitPlan], make_group: Callable[[str, GroupKey, Members], ParamGroup], memory: BucketMemory
) -> list[Unit]:
    units = []
    for plan in plans:
        with memory.unit(shares=plan.name != ROOT):
            buckets = [make_group(f"{plan.name}/{key.label}", key, members) for key, members in plan.buckets.items()]
        units.append(Unit(plan.name, plan.module, buckets))
    return units


def plan_units(
    module: nn.Module, unit_classes: Sequence[type[nn.Module]], compute: torch.dtype | None = None
) -> list[UnitPlan]:
    """Assign every parameter to a unit: the root, then units in definition order, without empty ones.

    compute: dtype of weights that are not kept in 8 bits; None: the module's.
    """
    plans, classes = {id(module): UnitPlan(ROOT, module)}, tuple(unit_classes)
    homes: dict[nn.Parameter, tuple[str, set[int]]] = {}
    unit_at = {"": id(module)}  # unit of the module at each path
    for path, part in module.named_modules(remove_duplicate=False):
        unit = unit_at[path.rpartition(".")[0]]
        if path and unit == id(module) and isinstance(compiled(part), classes):
            unit = id(part)
            plans.setdefault(unit, UnitPlan(path, part))
        unit_at[path] = unit
        for name, param in part.named_parameters(recurse=False):
            homes.setdefault(param, (f"{path}.{name}".lstrip("."), set()))[1].add(unit)
    for param, (name, units) in homes.items():
        home = next(iter(units)) if len(units) == 1 else id(module)
        key = GroupKey(param.dtype, param.requires_grad, is_expert(param), is_marked(param))
        if compute is not None and not key.fp8 and key.dtype != compute:
            key = replace(key, dtype=compute, stored=None if key.trainable else key.dtype)
        plans[home].buckets.setdefault(key, []).append((name, param))
    return [plan for plan in plans.values() if plan.name == ROOT or plan.buckets]
