"""A factor on the loss, so that gradients of fp16 weights and activations do not vanish.

[Note: Powers of two] The factor is a power of two and gradients are stored in fp32 or wider, so scaling them back is
exact (but for numbers below 2^-126 then). It comes before the norm and clipping, which see the true gradients.

[Note: All or none] Where the scaled loss overflows on one rank, every rank must leave the update out, or weights drift
apart and step counts differ. The reduction has carried what is not finite to the rank that owns it; one small
all-reduce carries the news to all. A skipped step touches neither weights nor the optimizer's state, and the next one
tries a smaller factor. At a factor of 1 there is nothing left to try, and gradients that are not finite are an error.

With `report_nan_in_param_grad` the guard finds the same gradients before their reduction; its report is the news then,
and is raised only where a smaller factor cannot help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.model import ShardedModel

INIT = 2.0**16
GROWTH_INTERVAL = 2000
LARGEST = 2.0**40
"""Far beyond what fp16 can use; a bound, so that training in wider formats does not drive the factor to infinity."""

SCALE_KEY, GOOD_STEPS_KEY = "scale", "good_steps"


class Outcome(NamedTuple):
    """Result of a step: norm of the unscaled gradient before clipping (NaN if skipped), the factor that was used, and
    whether the update was skipped."""

    norm: float
    scale: float
    skipped: bool


def is_power_of_two(value: float) -> bool:
    """Whether multiplying by it is exact."""
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


class LossScale:
    """A loss scale for one model, so that fp16 gradients do not underflow.

    A plain loop calls `scale(loss).backward()` and `step(optimizer)` in place of `optimizer.step()`. A framework calls
    `unscale_()`, updates the weights only if it returns True, and then calls `update()`.

    Args:
        model: its main gradients must be fp32 or wider.
        init: first factor, a power of two from 1 to 2^40.
        dynamic: whether the factor changes; a fixed one skips no step, and non-finite gradients show in the norm.
        growth_interval: steps without overflow after which the factor doubles, up to 2^40.
        backoff: the factor is multiplied by it at an overflow, down to 1; a power of two below 1.

    Raises:
        ValueError: a factor is no power of two or out of range, the interval is not positive, or gradients are stored
            in 16 bits, where scaling back is not exact.
    """

    def __init__(
        self,
        model: ShardedModel,
        *,
        init: float = INIT,
        dynamic: bool = True,
        growth_interval: int = GROWTH_INTERVAL,
        backoff: float = 0.5,
    ) -> None:
        if not (is_power_of_two(init) and 1.0 <= init <= LARGEST):
            raise ValueError(f"loss scale {init} is no power of two from 1 to 2^40; try {INIT:g}")
        if not (is_power_of_two(backoff) and backoff < 1.0):
            raise ValueError(f"backoff={backoff} must be a power of two below 1, like 0.5")
        if growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval} must be at least 1 step")
        narrow = [bucket.name for bucket in model.buckets if bucket.trainable and bucket.dtypes.grads.itemsize < 4]
        if narrow:
            raise ValueError(
                f"a loss scale needs main gradients in fp32 or wider, and {narrow[0]} stores them in 16 bits: set"
                " main_grads_dtype=torch.float32"
            )
        self.model = model
        self.value = init
        self.dynamic = dynamic
        self.growth_interval = growth_interval
        self.backoff = backoff
        self.good_steps = 0
        """Steps without overflow since the factor last changed."""
        self._finite: bool | None = None
        """Whether the step's gradients are; None before they were unscaled."""
        self._unscaled: int | None = None
        """Number of the step whose gradients were unscaled last."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor, in fp32 or wider, so that the factor itself does not overflow."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    def unscale_(self) -> bool:
        """Finish the step's gradients and divide them by the factor, once. *Collective.*

        Returns True if they are finite on all ranks. With a fixed factor it always returns True.

        Raises:
            FloatingPointError: with `report_nan_in_param_grad`, if a smaller factor cannot help.
            RuntimeError: they were divided already, for example by `step` of another optimizer of the model.
        """
        if self._finite is not None:
            return self._finite
        self._refuse_twice()
        found = self._finish()
        shards = [shard for bucket in self.model.buckets if bucket.trainable for shard in bucket.grad_shards]
        for shard in shards:
            shard.mul_(1.0 / self.value)
        self._finite = not self.dynamic or not (found or self._overflowed(shards))
        return self._finite

    def _refuse_twice(self) -> None:
        step = self.model._parts.step
        if step.has_gradients and step.number == self._unscaled:
            raise RuntimeError(
                "the gradients of this step were scaled back already: where several optimizers have parts of one model,"
                " call unscale_() once, step each of them if it says True, and then update(); or call zero_grad()"
                " before the next backward"
            )
        self._unscaled = step.number

    def _finish(self) -> bool:
        """Wait for the reductions; whether the guard found something that a smaller factor may cure."""
        try:
            self.model.finish_grad_sync()
        except FloatingPointError:
            guard = self.model._parts.guard
            if guard is None or not self.dynamic or self.value <= 1.0:
                raise
            guard.forget()
            self.model.finish_grad_sync()
            return True
        return False

    def _overflowed(self, shards: list[Tensor]) -> bool:
        device = self.model._parts.runtime.device
        found = torch.zeros(1, dtype=torch.float64, device=device)
        for shard in shards:
            if shard.numel():
                ends = torch.stack(shard.aminmax())  # without a temporary; NaN is both
                found += (~ends.isfinite()).any()
        return bool(self.model._parts.everyone.sum_scalars(found, "overflow"))

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> Outcome:
        """Unscale, clip to `max_norm` and update, unless gradients overflowed; then adapt the factor. *Collective.*

        `optimizer` is the one that `fully_shard` returned. None for `max_norm` does not clip. Gradients stay until
        `zero_grad`.

        Raises:
            FloatingPointError: gradients are not finite at a factor of 1; no weight was changed.
        """
        norm = math.nan
        if self.unscale_():
            norm = float(self.model.grad_norm() if max_norm is None else self.model.clip_grad_norm_(max_norm))
            optimizer.step()
        return self.update(norm)

    def update(self, norm: float = math.nan) -> Outcome:
        """Adapt the factor after a step. `unscale_` must have been called in it. `norm` is only put into the result.

        Raises:
            RuntimeError: `unscale_` was not called.
            FloatingPointError: gradients are not finite at a factor of 1.
        """
        finite, self._finite = self._finite, None
        if finite is None:
            raise RuntimeError("the gradients of this step were never unscaled: call unscale_() before update()")
        outcome = Outcome(norm, self.value, not finite)
        if not finite and self.value <= 1.0:
            raise FloatingPointError(
                "gradients are not finite at a loss scale of 1, where no smaller one can help; no weight was changed."
                " report_nan_in_param_grad=True names the tensor, the rank and the microbatch"
            )
        if self.dynamic:
            self._adapt(finite)
        return outcome

    def _adapt(self, finite: bool) -> None:
        self.good_steps += 1
        if not finite:
            self.value, self.good_steps = max(1.0, self.value * self.backoff), 0
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(LARGEST, self.value * 2.0), 0

    def state_dict(self) -> dict[str, Tensor]:
        """The factor (fp64) and the steps since it changed (int64), both of shape []."""
        return {
            SCALE_KEY: torch.tensor(self.value, dtype=torch.float64),
            GOOD_STEPS_KEY: torch.tensor(self.good_steps, dtype=torch.int64),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a key is missing or unexpected, or the factor is not a power of two from 1 to 2^40."""
        if set(state) != {SCALE_KEY, GOOD_STEPS_KEY}:
            raise ValueError(f"a loss scale's state has {SCALE_KEY} and {GOOD_STEPS_KEY}; this has {sorted(state)}")
        value = float(state[SCALE_KEY])
        if not (is_power_of_two(value) and 1.0 <= value <= LARGEST):
            raise ValueError(f"loss scale {value} is no power of two from 1 to 2^40")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: see `check_state`; nothing was loaded.
        """
        self.check_state(state)
        value = float(state[SCALE_KEY])
        self.value, self.good_steps, self._finite = value, int(state[GOOD_STEPS_KEY]), None
