"""Hooks that the program hangs on parameters, and what they must not do while a backward runs.

[Note: Stepping in a hook] "Optimizer in backward" updates a parameter as soon as its gradient is accumulated. In a
sharded model that gradient is of this rank alone, and on its way to the others: ranks would part, or the update would
be lost with gathered weights. `optimizer.step()` inside a backward is refused by the step's state; an update by hand is
seen here: while such a hook runs, edits through `data` are counted as the parameter's own are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from harness.fsdp.runtime.step import Step, StepError
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.at_rest import counting
from harness.fsdp.storage.parameter_access import WATCH
from harness.fsdp.tensor_parallel.parameters import handling_of
from harness.private_torch import accumulation_hooks, without_torch_function

Hook = Callable[[Any], Any]


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
                self._refuse()

    def _refuse(self) -> None:
        raise StepError(
            f"a hook (register_post_accumulate_grad_hook) has changed values of parameter {self.name} inside the"
            " backward, where .grad is of this rank alone and not yet summed over ranks: they would part, or the change"
            " be lost. Call optimizer.step() after backward(): strategies that split gradients keep a part of them"
            " only, which is what stepping in a hook would save"
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


def _edits(param: nn.Parameter) -> int:
    with without_torch_function():
        return handling_of(param).edits(param)
