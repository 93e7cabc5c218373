"""Hooks that keep nobody alive.

[Note: Who keeps whom] The module keeps the engine, so that a loop which goes on with the module alone still trains.
The engine keeps units and parameters, and looks at the module itself through a weak reference; hooks, which torch keeps
with modules, parameters and graphs, look so at the engine. Nothing of it is a cycle: when the program drops the
`ShardedModel` and the module, every bucket is freed at once, without the garbage collector and without `close()`.

[Note: Hooks and the compiler] `unit.compile()`, `torch.compile(unit)` and the like take in what a module's call does,
its hooks too; collectives cannot be traced. torch.compiler.disable would say so, at the price of a call more for each
hook, and of importing the compiler. What it rests on is set here at once, on the function that all hooks go through: an
attribute, which ends a graph where the hook is called, and the rule for its code, by which nothing below is compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from harness.private_torch import leave_to_python


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
        weak = self._weak
        if not weak:
            return self._function(owner, *self._args, *args, **kwargs)
        if len(weak) == 1:  # of a module: a unit
            return self._function(owner, weak[0](), *self._args, *args, **kwargs)
        if len(weak) == 2:  # of a parameter: a unit and its gradients
            return self._function(owner, weak[0](), weak[1](), *self._args, *args, **kwargs)
        return self._function(owner, *[each() for each in weak], *self._args, *args, **kwargs)


leave_to_python(WeakHook.__call__)
