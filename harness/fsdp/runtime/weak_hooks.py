"""Hooks that keep nobody alive, and hooks of the program on parameters.

[Note: Who keeps whom] The module keeps the engine, so that a loop which goes on with the module alone still trains. The
engine keeps units and parameters, and looks at the module itself through a weak reference; hooks, which torch keeps
with modules, parameters and graphs, look so at the engine. Nothing of it is a cycle: when the program drops the
`ShardedModel` and the module, every bucket is freed at once, without the garbage collector and without `close()`.

`unit.compile()`, `torch.compile(unit)` and the like take in what a module's call does, its hooks too; collectives
cannot be traced, so that a graph ends where a hook is called.

"Optimizer in backward" would update a parameter by a gradient of this rank alone: ranks would part, or the update be
lost with gathered weights. While such a hook runs, edits through `data` are counted as the parameter's own are.

torch shows such a hook the sum over all backwards so far. So do strategies that add up on each rank. Where earlier sums
lie elsewhere (split over ranks, or finished), an edit of `.grad` would miss them: it is refused. The engine's own hook
runs last and takes what others leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import call
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from harness.fsdp.runtime.step import Step, StepError
from harness.fsdp.storage.at_rest import counting
from harness.fsdp.storage.parameter_access import WATCH, grad_of, put_grad
from harness.fsdp.tensor_parallel import edits_of, values_here
from harness.private_torch import accumulation_hooks, without_torch_function

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


class ProgramHook:
    """User's post-accumulate hook, which must not change its parameter.

    sums_elsewhere: asked in a backward, if gradients of earlier ones are not in `.grad`.
    """

    def __init__(self, hook: Hook, name: str, step: Step, sums_elsewhere: Callable[[], bool]) -> None:
        self.hook, self.name, self.step, self.sums_elsewhere = hook, name, step, sums_elsewhere

    def __call__(self, param: nn.Parameter) -> None:
        """Raises StepError if the hook has changed its parameter, or a gradient of which `.grad` is a part."""
        if not self.step.in_backward:
            self.hook(param)
            return
        own = type(param)
        before: Tensor | None = None
        with without_torch_function():
            edits, shown = edits_of(param), grad_of(param)
            if shown is not None and self.sums_elsewhere():
                before = shown.detach().clone()
        param.__class__ = counting(own)
        try:
            self.hook(param)
        finally:
            param.__class__ = own
        with without_torch_function():
            if edits_of(param) != edits:
                self._refuse("changed values")
            left = grad_of(param)
            if shown is None or (left is shown and before is None):
                return
            if left is None or (before is not None and not _same_bits(left, before)):
                self._refuse("dropped .grad" if left is None else "changed .grad")
            elif left is not shown:
                shown.copy_(left)
                put_grad(param, shown)

    def _refuse(self, did: str) -> NoReturn:
        raise StepError(
            f"a hook (register_post_accumulate_grad_hook) has {did} of parameter {self.name} inside the backward,"
            " where .grad is a part of the gradient alone: not yet summed over ranks, and without earlier backwards of"
            " the step. Call optimizer.step() after backward(), and edit p.grad for p in model.parameters() between the"
            " last backward and optimizer.step(); or edit what each backward brings by param.register_hook(function)"
        )


def watch(name: str, param: nn.Parameter, step: Step, sums_elsewhere: Callable[[], bool]) -> None:
    """Watch hooks on an unsharded parameter, those registered later too, and let them run before the engine's."""

    def watched(hook: Hook) -> Hook:
        return hook if isinstance(hook, WeakHook | ProgramHook) else ProgramHook(hook, name, step, sums_elsewhere)

    def hang(to: Tensor, hook: Hook) -> Any:
        handle = Tensor.register_post_accumulate_grad_hook(to, watched(hook))  # type: ignore[no-untyped-call] # torch's
        hooks: dict[int, Hook] = accumulation_hooks(to) or {}
        for key in [key for key, each in hooks.items() if isinstance(each, WeakHook)]:
            hooks[key] = hooks.pop(key)
        return handle

    setattr(param, WATCH, hang)
    hooks: dict[int, Hook] = accumulation_hooks(param) or {}
    for key, hook in hooks.items():
        hooks[key] = watched(hook)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    one, other = (values_here(each).reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(one, other)
