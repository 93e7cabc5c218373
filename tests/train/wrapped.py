"""Engines around an engine, or around nothing, for tests of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.engines.protocol import Engine, Microbatch


class Wrapped(Engine):
    """An engine that passes everything on, for tests that change one thing."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        return self.inner.forward_backward(batch, last=last)

    def step(self, lr: float) -> float:
        return self.inner.step(lr)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self.inner.named_gradients()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.inner.named_weights()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(state)

    def accounted_bytes(self) -> dict[str, int]:
        return self.inner.accounted_bytes()


class Idle(Wrapped):
    """Does no work, so that what a step takes is what the harness takes."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        return torch.tensor(1.0)

    def step(self, lr: float) -> float:
        return 1.0
