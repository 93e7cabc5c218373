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

[Note: Whole matrices] Muon's momentum is elementwise, and bounded so. Its update is not: no element of what is
orthogonalized exceeds the largest singular value that the iteration can end with (`Iteration.reach`), and that is all
that one element tells. A whole matrix is worked out as torch does, rounded to bfloat16 after every operation; and once
more, where what lies near a tie is rounded to the other side. Products are added up in fp32, in an order that nobody
knows: k terms err by 2^-24 sqrt(k), and up to 65,536 of them leave a tie open within `TIE`. How far the two lie apart
is what that does to this very matrix: 0.01 of an update where singular values are alike, 0.6 where most are too small
for bfloat16. Torch was measured to lie within 0.6 of it; twice is allowed, and `FLIP`, as small matrices flip seldom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.config.roundoff import UNIT
from harness.config.schema import OptimizerConfig

KNOWN = ("sgd", "adam", "adamw", "muon")

COEFFICIENT = 8 * UNIT["fp32"]
"""Relative error of the clipping factor: of a norm summed in fp32 or wider, and of a quotient."""

TINY = 1e-300
"""Keeps 0 / 0 a number."""

MUON_EPS = 1e-7
"""Least norm by which Muon divides: torch's default."""

TIE = 2.0**-16
"""Relative."""

FLIP = 0.005
"""Relative distance of two updates by one rounding of an element."""

OWN = 2.0**-50
"""Relative error of the rule's evaluation in fp64."""


class Units(NamedTuple):
    weights: float
    gradients: float
    moments: float


class Iteration(NamedTuple):
    """Settings of Muon's Newton-Schulz iteration, and of what its result is multiplied with."""

    nesterov: bool
    ns_coefficients: Sequence[float]
    ns_steps: int
    adjust_lr_fn: str

    @property
    def reach(self) -> float:
        """Largest singular value of a result, and a tenth more for bfloat16."""
        values = [place / 4096 for place in range(4097)]
        a, b, c = self.ns_coefficients
        for _ in range(self.ns_steps):
            values = [value * (a + b * value**2 + c * value**4) for value in values]
        return 1.1 * max(map(abs, values))

    def scale(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns)) if columns else 1.0

    def orthogonalized(self, matrix: Any, rounded: Callable[[Any], Any]) -> Any:
        """rounded: applied to each operation's result. Stacks of matrices are orthogonalized one by one."""
        a, b, c = self.ns_coefficients
        is_tall, matrix = matrix.shape[-2] > matrix.shape[-1], rounded(matrix)
        wide = matrix.swapaxes(-1, -2) if is_tall else matrix
        norm = rounded((wide * wide).sum(axis=(-1, -2), keepdims=True) ** 0.5)
        wide = rounded(wide / (norm + MUON_EPS * (norm < MUON_EPS)))
        for _ in range(self.ns_steps):
            gram = rounded(wide @ wide.swapaxes(-1, -2))
            wide = rounded(a * wide + rounded(b * gram + c * (gram @ gram)) @ wide)
        return wide.swapaxes(-1, -2) if is_tall else wide


AS_TORCH = Iteration(True, (3.4445, -4.775, 2.0315), 5, "original")


def narrowed(value: Any) -> Any:
    """fp64 rounded to the 8 significant bits of bfloat16 (Veltkamp)."""
    large = value * (2.0**45 + 1)
    return large - (large - value)


def narrowed_otherwise(value: Any) -> Any:
    """As `narrowed`, but what lies within `TIE` of a tie goes to the other side."""
    is_above = (value - narrowed(value)) > 0
    return narrowed(value + TIE * abs(value) * (is_above * 2.0 - 1.0))


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
    """SGD with momentum, Adam with the decay in the gradient, AdamW with decoupled decay, Muon, with its constants.

    Kingma & Ba 2015, Loshchilov & Hutter 2019, Jordan 2024, as torch states them.
    """

    name: str
    betas: tuple[float, float]
    eps: float
    momentum: float
    decay: float
    iteration: Iteration = AS_TORCH

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rule:
        """Args: config: settings as `optimizer.lr`."""
        beta1, beta2 = map(float, config["optimizer.betas"])
        eps, momentum, decay = (float(config[f"optimizer.{name}"]) for name in ("eps", "momentum", "weight_decay"))
        iteration = Iteration._make(config.get(f"optimizer.{name}") for name in Iteration._fields)
        return cls(str(config["optimizer.name"]), (beta1, beta2), eps, momentum, decay, iteration)

    @classmethod
    def of_config(cls, given: OptimizerConfig) -> Rule:
        return cls.of({f"optimizer.{name}": getattr(value, "name", value) for name, value in vars(given).items()})

    def of_tensor(self, *, orthogonalized: bool) -> Rule:
        """Rule of one tensor: under Muon that of the AdamW beside it, unless it is `orthogonalized`."""
        return self if self.name != "muon" or orthogonalized else replace(self, name="adamw")

    @property
    def decay_is_in_gradient(self) -> bool:
        return self.name in ("sgd", "adam")

    @property
    def entries(self) -> tuple[str, ...]:
        if self.name in ("sgd", "muon"):
            return ("momentum_buffer",) if self.momentum or self.name == "muon" else ()
        return ("exp_avg", "exp_avg_sq") if self.name in KNOWN else ()

    def update(self, state: UpdateState, gradient: Any, step: int, lr: float, *, decays: bool) -> Any:
        """Update of weights by a clipped gradient; advances the moments of `state`. `decays`: weight decay applies."""
        decay = self.decay if decays else 0.0
        return self._update(state, gradient, step, lr, decay)

    def _update(self, state: UpdateState, gradient: Any, step: int, lr: float, decay: Any) -> Any:
        if self.decay_is_in_gradient:
            gradient = gradient + decay * state.weights
        if self.name == "muon":
            state.first = self.momentum * state.first + (1 - self.momentum) * gradient
            return self.matrix_step(self.mix(state.first, gradient), lr)[0] - lr * decay * state.weights
        if self.name == "sgd":
            state.first = self.momentum * state.first + gradient
            return -lr * state.first
        beta1, beta2 = self.betas
        state.first = beta1 * state.first + (1 - beta1) * gradient
        state.second = beta2 * state.second + (1 - beta2) * gradient**2
        root = (state.second / (1 - beta2**step)) ** 0.5 + self.eps
        change = -lr * (state.first / (1 - beta1**step)) / root
        return change - lr * decay * state.weights if self.name == "adamw" else change

    def mix(self, momentum: Any, gradient: Any) -> Any:
        """Matrix that Muon orthogonalizes, given its momentum after a gradient."""
        return gradient + self.momentum * (momentum - gradient) if self.iteration.nesterov else momentum

    def matrix_step(self, mixed: Any, lr: float) -> tuple[Any, Any]:
        """A matrix's change without decay, and how far rounding moves it; see [Note: Whole matrices]."""
        rate, found = -lr * self.iteration.scale(*mixed.shape[-2:]), self.iteration.orthogonalized(mixed, narrowed)
        off = found - self.iteration.orthogonalized(mixed, narrowed_otherwise)
        apart = 2 * (off * off).sum() ** 0.5 + FLIP * (found * found).sum() ** 0.5
        return rate * found, abs(rate) * apart

    def reach(self, shape: Sequence[int]) -> float:
        """Largest move of one element by Muon at a rate of 1; 0 for other rules."""
        if self.name != "muon":
            return 0.0
        return self.iteration.reach * self.iteration.scale(*shape[-2:])

    def rounding(self, state: UpdateState, gradient: Any, lr: float) -> Any:
        """Distance that rounding of the iteration explains in a matrix's update; 0 but for Muon."""
        if self.name != "muon":
            return 0.0
        momentum = self.momentum * state.first + (1 - self.momentum) * gradient
        return self.matrix_step(self.mix(momentum, gradient), lr)[1]

    def gradient_taken(self, state: UpdateState, first: Any, decay: Any) -> Any:
        """Clipped gradient that took the first moment from the state's to `first`; None without a moment."""
        if not self.entries:
            return None
        kept = self.momentum if self.name in ("sgd", "muon") else self.betas[0]
        taken = (first - kept * state.first) / (1.0 if self.name == "sgd" else 1 - kept)
        return taken - decay * state.weights if self.decay_is_in_gradient else taken

    def bounded(
        self, state: UpdateState, gradient: Any, step: int, lr: float, decay: Any, units: Units, reach: Any = 0.0
    ) -> Update:
        """Update of single elements, and bounds of its rounding: see [Note: Single updates].

        Args: state: before the step. gradient: averaged and clipped. step: counted from 1. decay: of each element, or
        of all. units: of the dtypes in the engine. reach: of Muon, how far an element moves at a rate of 1.
        """
        if self.name == "muon":
            first = self.momentum * state.first + (1 - self.momentum) * gradient
            kept = state.weights * (1 - lr * decay)
            share, nothing = 1 - self.momentum, 0.0 * kept
            first_error = 4 * (units.moments + OWN) * (self.momentum * abs(state.first) + share * abs(gradient))
            first_error = first_error + share * self._gradient_error(state, gradient, decay, units)
            return Update(kept, first, nothing, lr * reach + 4 * units.weights * abs(kept), first_error, nothing)
        after = UpdateState(state.weights, state.first, state.second)
        weights = state.weights + self._update(after, gradient, step, lr, decay)
        given = abs(gradient)
        if self.decay_is_in_gradient:
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
        return off + 4 * units.weights * decay * abs(state.weights) if self.decay_is_in_gradient else off

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
