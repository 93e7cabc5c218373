"""An optimizer's rule in fp64, worked out from its configuration: what a step should have done to a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.parity.tensors import Float64


KNOWN = ("sgd", "adam", "adamw")
"""Optimizers, by `optimizer.name`, whose rules are worked out here."""


@dataclass
class UpdateState:
    """One tensor's weights and moments before a step."""

    weights: Float64
    first: Float64 | float = 0.0
    """Momentum, or Adam's first moment."""
    second: Float64 | float = 0.0


@dataclass(frozen=True)
class Rule:
    """An optimizer's rule with its constants."""

    name: str
    betas: tuple[float, float]
    eps: float
    momentum: float
    decay: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rule:
        """Read it from a frozen configuration (flat, dotted keys)."""
        beta1, beta2 = (float(beta) for beta in config["optimizer.betas"])
        return cls(
            str(config["optimizer.name"]),
            (beta1, beta2),
            float(config["optimizer.eps"]),
            float(config["optimizer.momentum"]),
            float(config["optimizer.weight_decay"]),
        )

    def update(self, state: UpdateState, gradient: Float64, step: int, lr: float) -> Float64:
        """What the step adds to the weights; moves the state's moments on. `gradient` is clipped."""
        import numpy as np

        decay = self.decay if state.weights.ndim > 1 else 0.0  # matrices decay, vectors do not
        if self.name != "adamw" and decay:
            gradient = gradient + decay * state.weights
        if self.name == "sgd":
            state.first = self.momentum * state.first + gradient
            return -lr * state.first
        beta1, beta2 = self.betas
        state.first = beta1 * state.first + (1 - beta1) * gradient
        state.second = beta2 * state.second + (1 - beta2) * gradient**2
        root = np.sqrt(state.second / (1 - beta2**step)) + self.eps
        change: Float64 = -lr * (state.first / (1 - beta1**step)) / root
        return change - lr * decay * state.weights if self.name == "adamw" else change

    def corrected(self, step: int) -> float:
        """What Adam's bias corrections multiply an update with at a step."""
        return math.sqrt(1.0 - self.betas[1] ** step) / (1.0 - self.betas[0] ** step)
