"""Hooks that keep nobody alive, and hooks of the program on parameters.

[Note: Who keeps whom] The module keeps the engine, so that a loop which goes on with the module alone still trains.
The engine keeps units and parameters, and looks at the module itself through a weak reference; hooks, which torch keeps
with modules, parameters and graphs, look so at the engine. Nothing of it is a cycle: when the program drops the
`ShardedModel` and the module, every bucket is freed at once, without the garbage collector and without `close()`.

[Note: Hooks and the compiler] `unit.compile()`, `torch.compile(unit)` and the like take in what a module's call does,
its hooks too; collectives cannot be traced. torch.compiler.disable would say so, at the price of a call more for each
hook, and of importing the compiler. What it rests on is set here at once, on the function that all hooks go through: an
attribute, which ends a graph where the hook is called, and the rule for its code, by which nothing below is compiled.

[Note: Stepping in a hook] "Optimizer in backward" updates a parameter as soon as its gradient is accumulated. In a
sharded model that gradient is of this rank alone, and on its way to the others: ranks would part, or the update would
be lost with gathered weights. `optimizer.step()` inside a backward is refused by the step's state; an update by hand is
seen here: while such a hook runs, edits through `data` are counted as the parameter's own are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import call
from types import MethodType
from typing import Any, cast

from torch import nn

from harness.fsdp.comm.events import marked
from harness.fsdp.runtime.step import Step, StepError
from harness.fsdp.storage.at_rest import counting
from harness.fsdp.storage.parameter_access import WATCH, by_engine
from harness.fsdp.tensor_parallel.parameters import edits_of
from harness.private_torch import accumulation_hooks, is_profiled, leave_to_python

Hook = Callable[[Any], Any]


class WeakHook:
    """Like functools.partial of a bound method, with weak references to the object and to arguments
    `kept_by_engine`."""

    __slots__ = ("_args", "_function", "_owner", "_weak")

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        bound = cast(MethodType, method)
        self._owner = weakref.ref(bound.__self__)
        self._function = bound.__func__
        kept = 0
        while kept < len(args) and getattr(args[kept], "kept_by_engine", False):
            kept += 1
        self._weak = tuple(map(weakref.ref, args[:kept]))
        self._args = args[kept:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError when the engine is gone."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                "the sharded model that this module or tensor belonged to is gone: keep the ShardedModel, or the module"
                " that was sharded, as long as its parts and outputs are used"
            )
        if not is_profiled():
            return self._function(owner, *map(call, self._weak), *self._args, *args, **kwargs)
        given = [*map(call, self._weak)]
        with marked(self._function.__name__.removeprefix("_"), getattr(given[0], "name", "") if given else ""):
            return self._function(owner, *given, *self._args, *args, **kwargs)


leave_to_python(WeakHook.__call__)


class ProgramHook:
    """User's post-accumulate hook, which must not change its parameter; see [Note: Stepping in a hook]."""

    def __init__(self, hook: Hook, name: str, step: Step) -> None:
        self.hook = hook
        self.name = name
        self.step = step

    def __call__(self, param: nn.Parameter) -> None:
        """Raises StepError if the hook has changed its parameter."""
        if not self.step.in_backward:
            self.hook(param)
            return
        own, before = type(param), _edits(param)
        param.__class__ = counting(own)
        try:
            self.hook(param)
        finally:
            param.__class__ = own
        if _edits(param) != before:
            raise StepError(
                f"a hook (register_post_accumulate_grad_hook) has changed values of parameter {self.name} inside the"
                " backward, where .grad is of this rank alone and not yet summed over ranks: they would part, or the"
                " change be lost. Call optimizer.step() after backward(): strategies that split gradients keep a part"
                " of them only, which is what stepping in a hook would save"
            )


def watch(params: Iterable[tuple[str, nn.Parameter]], step: Step) -> None:
    """Watch hooks on unsharded parameters, those registered later too."""
    for name, param in params:

        def watched(hook: Hook, name: str = name) -> Hook:
            return hook if isinstance(hook, WeakHook | ProgramHook) else ProgramHook(hook, name, step)

        setattr(param, WATCH, watched)
        hooks: dict[int, Hook] = accumulation_hooks(param) or {}
        for key, hook in hooks.items():
            hooks[key] = watched(hook)


@by_engine
def _edits(param: nn.Parameter) -> int:
    return edits_of(param)
