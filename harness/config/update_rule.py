"""An optimizer's rule, worked out from its configuration: what a step should do to a tensor, and how far roundings can
drive it. For numpy arrays and torch tensors alike, in fp64.

[Note: Single updates] One element's update is a dozen operations, so the bound is a worst case, not a walk: every
operation errs by its unit at most, errors pass through the derivatives, and constants are rounded up to powers of two.
What exceeds it was not rounded but done otherwise. With |x| the size of an element, u the unit in which it is kept:

    gradient        |g| (4 u_g + 8 u_fp32): averaged, clipped by a factor that is a quotient by the logged norm, kept
    first moment    4 u (b1 |m| + (1 - b1) |g|) + (1 - b1) e_g
    second moment   4 u (b2 v + (1 - b2) g^2) + (1 - b2) 2 |g| e_g
    root            e_v / 2 sqrt(v), no more than sqrt(e_v)
    change          e_m / root + |change| (e_root / root + 16 u)
    weight          that, times the rate, and 4 u (|w before| + |w after|), decay and sum
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.config.roundoff import UNIT
from harness.config.schema import OptimizerConfig

KNOWN = ("sgd", "adam", "adamw")

COEFFICIENT = 8 * UNIT["fp32"]
"""Relative error of the clipping factor: of a norm summed in fp32 or wider, and of a quotient."""

TINY = 1e-300
"""Keeps 0 / 0 a number."""

OWN = 2.0**-50
"""Relative error of the rule's evaluation in fp64."""


class Units(NamedTuple):
    weights: float
    gradients: float
    moments: float


@dataclass
class UpdateState:
    weights: Any
    first: Any = 0.0
    second: Any = 0.0


class Update(NamedTuple):
    weights: Any
    first: Any
    second: Any
    weights_error: Any
    first_error: Any
    second_error: Any


@dataclass(frozen=True)
class Rule:
    """SGD with momentum, Adam with the decay in the gradient, AdamW with decoupled decay, with its constants.

    Kingma & Ba 2015, Loshchilov & Hutter 2019, as torch states them.
    """

    name: str
    betas: tuple[float, float]
    eps: float
    momentum: float
    decay: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rule:
        beta1, beta2 = (float(beta) for beta in config["optimizer.betas"])
        return cls(
            str(config["optimizer.name"]),
            (beta1, beta2),
            float(config["optimizer.eps"]),
            float(config["optimizer.momentum"]),
            float(config["optimizer.weight_decay"]),
        )

    @classmethod
    def of_config(cls, given: OptimizerConfig) -> Rule:
        return cls(given.name.name, (given.betas[0], given.betas[1]), given.eps, given.momentum, given.weight_decay)

    @property
    def entries(self) -> tuple[str, ...]:
        if self.name == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq") if self.name in KNOWN else ()

    def update(self, state: UpdateState, gradient: Any, step: int, lr: float, *, decays: bool) -> Any:
        """Update of weights by a clipped gradient; advances the moments of `state`. `decays`: weight decay applies."""
        decay = self.decay if decays else 0.0
        return self._update(state, gradient, step, lr, decay)

    def _update(self, state: UpdateState, gradient: Any, step: int, lr: float, decay: Any) -> Any:
        if self.name != "adamw":
            gradient = gradient + decay * state.weights
        if self.name == "sgd":
            state.first = self.momentum * state.first + gradient
            return -lr * state.first
        beta1, beta2 = self.betas
        state.first = beta1 * state.first + (1 - beta1) * gradient
        state.second = beta2 * state.second + (1 - beta2) * gradient**2
        root = (state.second / (1 - beta2**step)) ** 0.5 + self.eps
        change = -lr * (state.first / (1 - beta1**step)) / root
        return change - lr * decay * state.weights if self.name == "adamw" else change

    def gradient_taken(self, state: UpdateState, first: Any, decay: Any) -> Any:
        """Clipped gradient that took the first moment from the state's to `first`; None without a moment."""
        if not self.entries:
            return None
        kept, share = (self.momentum, 1.0) if self.name == "sgd" else (self.betas[0], 1 - self.betas[0])
        taken = (first - kept * state.first) / share
        return taken if self.name == "adamw" else taken - decay * state.weights

    def bounded(self, state: UpdateState, gradient: Any, step: int, lr: float, decay: Any, units: Units) -> Update:
        """Update of single elements, and bounds of its rounding: see [Note: Single updates].

        Args: state: before the step. gradient: averaged and clipped. step: counted from 1. decay: of each element, or
        of all. units: of the dtypes in the engine.
        """
        after = UpdateState(state.weights, state.first, state.second)
        weights = state.weights + self._update(after, gradient, step, lr, decay)
        given = abs(gradient)
        if self.name != "adamw":
            given = given + decay * abs(state.weights)
        off = self._gradient_error(state, gradient, decay, units)
        unit = units.moments + OWN
        if self.name == "sgd":
            first_error = 4 * unit * (self.momentum * abs(state.first) + given) + off
            moved = lr * (first_error + 4 * units.weights * abs(after.first))
            second_error: Any = 0.0
        else:
            first_error, second_error, moved = self._adams(state, after, given, off, step, lr, unit)
        weights_error = moved + 4 * (units.weights + OWN) * (abs(state.weights) + abs(weights))
        return Update(weights, after.first, after.second, weights_error, first_error, second_error)

    def _gradient_error(self, state: UpdateState, gradient: Any, decay: Any, units: Units) -> Any:
        off = abs(gradient) * (4 * units.gradients + COEFFICIENT)
        return off if self.name == "adamw" else off + 4 * units.weights * decay * abs(state.weights)

    def cancelling(self, state: UpdateState, gradient: Any, step: int, lr: float, units: Units, *, decays: bool) -> Any:
        """Bound on each element's change from rounding of the gradient alone; 0 without decay.

        A gradient and its decay may cancel, and Adam divides by the rest: a first change may then flip its sign.
        `state` is not changed.
        """
        decay = self.decay if decays else 0.0
        if self.name != "adam" or not decay:
            return 0.0
        off = self._gradient_error(state, gradient, decay, units)
        here, above, below = (
            self._update(replace(state), gradient + sign * off, step, lr, decay) for sign in (0.0, 1.0, -1.0)
        )
        up, down = abs(above - here), abs(below - here)
        return up * (up >= down) + down * (down > up)

    def _adams(
        self, state: UpdateState, after: UpdateState, given: Any, off: Any, step: int, lr: float, unit: float
    ) -> tuple[Any, Any, Any]:
        beta1, beta2 = self.betas
        first_error = 4 * unit * (beta1 * abs(state.first) + (1 - beta1) * given) + (1 - beta1) * off
        second_error = 4 * unit * (beta2 * state.second + (1 - beta2) * given**2) + (1 - beta2) * 2 * given * off
        correction = 1 - beta2**step
        root = (after.second / correction) ** 0.5 + self.eps
        # of a root: half the relative error, but no more than the root of what is not known at all
        root_error = (second_error / correction) ** 0.5
        halved = second_error / (2 * correction * (root - self.eps + TINY))
        root_error = root_error * (halved > root_error) + halved * (halved <= root_error)
        rate = lr / (1 - beta1**step)
        least = root - root_error
        least = least * (least > self.eps) + self.eps * (least <= self.eps)
        change = abs(rate * after.first / root)
        moved = rate * first_error / least + change * (root_error / least + 16 * unit)
        return first_error, second_error, moved

    def corrected(self, step: int) -> float:
        return math.sqrt(1.0 - self.betas[1] ** step) / (1.0 - self.betas[0] ** step)
