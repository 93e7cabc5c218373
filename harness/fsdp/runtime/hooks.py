"""All hooks of one model: what is known of where the program is, and how they are taken off."""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.forward import Forward
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.units import Unit


class Hooks:
    def __init__(
        self,
        units: Sequence[Unit],
        gather: GatherPipeline,
        reduce: ReducePipeline,
        step: Step,
        guard: GradientGuard | None = None,
    ) -> None:
        self.step = step
        self.forward = Forward(units[0].name)
        self.of_backward = BackwardHooks(units, gather, reduce, step, self.forward, guard)
        self.of_forward = ForwardHooks(units, gather, step, self.forward, self.of_backward)

    @property
    def is_installed(self) -> bool:
        return bool(self.of_forward.handles)

    def remove(self) -> None:
        for handles in (self.of_forward.handles, self.of_backward.handles):
            for handle in handles:
                handle.remove()
            handles.clear()

    def recover(self) -> None:
        self.of_backward.recover()

    @property
    def is_inside(self) -> bool:
        """True inside the model's forward or backward."""
        return self.forward.in_model or self.step.in_backward

    def where(self) -> str:
        if self.step.in_backward:
            return f"in the backward of {self.of_backward.reached}"
        running, root = tuple(self.forward.running), self.forward.root
        if running:
            return f"in the forward of {', '.join(name for name in running if name != root) or root}"
        return "outside the model's forward and backward"
