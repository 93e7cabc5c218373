"""Separate times of forward and backward without the engine's help: the workload times its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.engines.protocol import Microbatch, Workload
from harness.probe.timers import Timers


class TimedWorkload(Workload):
    """Workload whose `loss` is a `forward` span, and whose initial weights each call `alive`."""

    def __init__(self, inner: Workload, timers: Timers, alive: Callable[[], None] = lambda: None) -> None:
        self.inner = inner
        self.timers = timers
        self.alive = alive
        self.unit_classes = inner.unit_classes
        self.may_leave_unused = inner.may_leave_unused

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        return self.inner.build(device, dtype)

    def quantize(self, model: nn.Module, device: torch.device) -> None:
        self.inner.quantize(model, device)

    def cut(self, model: nn.Module, axis: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.inner.cut(model, axis, sequence_parallel=sequence_parallel)

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        self.alive()
        return self.inner.initial_weight(name, shape)

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        self.inner.materialise_buffers(model, device)

    def loss(self, model: nn.Module, batch: Microbatch) -> Tensor:
        with self.timers.span("forward"):
            return self.inner.loss(model, batch)

    def decays(self, name: str, shape: torch.Size) -> bool:
        return self.inner.decays(name, shape)
