"""Factor on the loss, so that gradients of fp16 weights and activations do not vanish: torch's `GradScaler`.

Factors are powers of two and gradients are fp32 or wider, so unscaling is exact above 2^-126. It precedes norm and
clipping, which see the true gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GROWING_FROM, LARGEST = 2.0**16, 2.0**40
"""Bounds far beyond fp16's use, so that wider formats do not drive the factor to infinity."""
SCALE_KEY, GOOD_STEPS_KEY = "scale", "good_steps"


class Gradients(Protocol):
    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply in place. Collective over all ranks."""

    def grad_norm(self) -> float:
        """Euclidean norm over all ranks. Collective over them."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip; returns the norm before. Collective over all ranks."""


class Outcome(NamedTuple):
    """Norm of the unscaled gradient before clipping (NaN if skipped), the factor, and whether the update was
    skipped."""

    norm: float
    scale: float
    skipped: bool


class LossScale:
    """A loss scale for one model and its optimizer.

    Args: fixed: a power of two; 0: dynamic, halved at an overflow (whose update all ranks skip), doubled after
    `growth_interval` steps without one.
    """

    def __init__(self, model: Gradients, optimizer: torch.optim.Optimizer, fixed: float, growth_interval: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.fixed = fixed
        device = optimizer.param_groups[0]["params"][0].device.type
        self.scaler = torch.amp.GradScaler(device, init_scale=fixed or GROWING_FROM, growth_interval=growth_interval)
        self._is_unscaled = False

    @property
    def value(self) -> float:
        return float(self.scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """Loss times the factor, in fp32 or wider, so that the factor itself does not overflow."""
        return self.scaler.scale(loss.to(torch.promote_types(loss.dtype, torch.float32)))

    def unscale_(self) -> None:
        """Divide the step's gradients by the factor, once. Collective over all ranks."""
        if self._is_unscaled:
            return
        self._is_unscaled = True
        if self.fixed:
            self.model.scale_gradients(1.0 / self.fixed)
        else:
            self.scaler.unscale_(self.optimizer)

    def step(self, max_norm: float | None) -> Outcome:
        """Clip and update, unless gradients overflowed; then adapt the factor. Collective over all ranks.

        Raises `FloatingPointError`: gradients are not finite at a factor of 1; no weight was changed.
        """
        self.unscale_()
        self._is_unscaled = False
        scale = self.value
        norm = float(self.model.grad_norm() if max_norm is None else self.model.clip_grad_norm_(max_norm))
        if self.fixed:
            self.optimizer.step()
            return Outcome(norm, scale, False)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.value < scale
        if skipped and scale <= 1.0:
            raise FloatingPointError(
                "gradients are not finite at a loss scale of 1, where no smaller one can help; no weight was changed."
                " engine.report_nan_in_param_grad=true with dtype.loss_scale=none names the tensor, the rank and the"
                " microbatch"
            )
        if self.value > LARGEST:
            self.scaler.update(LARGEST)
        return Outcome(math.nan if skipped else norm, scale, skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """Factor (fp64) and steps since it changed (int64), both of shape []."""
        held = self.scaler.state_dict()
        return {
            SCALE_KEY: torch.tensor(held["scale"], dtype=torch.float64),
            GOOD_STEPS_KEY: torch.tensor(held["_growth_tracker"], dtype=torch.int64),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises `ValueError`: a key is missing or unexpected, or the factor is no power of two from 1 to 2^40."""
        if set(state) != {SCALE_KEY, GOOD_STEPS_KEY}:
            raise ValueError(f"a loss scale's state has {SCALE_KEY} and {GOOD_STEPS_KEY}; this has {sorted(state)}")
        value = float(state[SCALE_KEY])
        if not (1.0 <= value <= LARGEST and math.frexp(value)[0] == 0.5):
            raise ValueError(f"loss scale {value} is no power of two from 1 to 2^40")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises `ValueError` as `check_state`; nothing was loaded."""
        self.check_state(state)
        saved = {"scale": float(state[SCALE_KEY]), "_growth_tracker": int(state[GOOD_STEPS_KEY])}
        self.scaler.load_state_dict(self.scaler.state_dict() | saved)
        self._is_unscaled = False
