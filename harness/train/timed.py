"""Separate times of forward and backward without the engine's help: the workload times its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.engines.protocol import Microbatch, Workload
from harness.probe.timers import Timers


def timed_workload(inner: Workload, timers: Timers, alive: Callable[[], None] = lambda: None) -> Workload:
    """The workload with its `loss` in a `forward` span, and with each of its initial weights calling `alive`."""
    return cast("Workload", _Timed(inner, timers, alive))


class _Timed:
    def __init__(self, inner: Workload, timers: Timers, alive: Callable[[], None]) -> None:
        self.inner, self.timers, self.alive = inner, timers, alive

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        self.alive()
        return self.inner.initial_weight(name, shape)

    def loss(self, model: nn.Module, batch: Microbatch) -> Tensor:
        with self.timers.span("forward"):
            return self.inner.loss(model, batch)
