"""How far rounding alone can drive two runs apart: T2's bounds, derived from what either of them rounds.

docs/verdicts.md ("T2: the envelope at step 1") derives them. What swapped routes explain is in doubt, never fine and
never refuted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from harness.config.roundoff import RMS, SIXTEEN_BITS, UNIT
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import RARE, SAFETY, SIGMAS, Arithmetic, margin

FEW = 7


@dataclass(frozen=True)
class Envelope:
    arm: Arithmetic
    control: Arithmetic
    same_forward: bool = False
    """True if the losses of step 1 agree in every bit, which excludes swapped routes."""
    reach: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Effect of rounding on gradients in the perturbed reference, by compute dtype and parameter."""
    draws: int = 0
    """Draws that `reach` is the mean square of."""

    @classmethod
    def of(cls, arm: Record, control: Record) -> Envelope:
        known = control if control.moves else arm  # of one model, one batch and the same weights, so whose is no matter
        losses = [run.series("loss")[:1] for run in (arm, control)]
        same = bool(losses[0]) and losses[0] == losses[1]
        left, right = (Arithmetic.of(run.config).observed(known.moves, known.draws) for run in (arm, control))
        return cls(left, right, same, known.moves, known.draws)

    @property
    def is_bounded(self) -> bool:
        return self.arm.is_bounded and self.control.is_bounded

    @property
    def flips(self) -> int:
        """Most tokens, over all blocks, that rounding sends to another expert at step 1: exceeded once in a million."""
        if self.same_forward:
            return 0
        return _most(self.arm.swapped(math.hypot(self.arm.forward, self.control.forward), self.arm.tokens))

    @property
    def rerouted(self) -> float:
        """Effect of flips on a gradient that all tokens feed: each replaces one token's share by another.

        An expert's own gradient may change by anything, where few tokens feed it.
        """
        return SAFETY * math.sqrt(2 * self.flips / self.arm.tokens)

    @property
    def rerouted_scale(self) -> float:
        return 2 * self.flips / self.arm.tokens

    @property
    def rerouted_loss(self) -> float:
        """Effect of flips on the loss: that of as many tokens, in either direction."""
        return SAFETY * math.sqrt(self.flips) / self.arm.tokens

    @property
    def rerouted_norm(self) -> float:
        """Effect of flips on the gradient's norm: that of a distance without direction."""
        return self.rerouted / math.sqrt(self.arm.tokens) + self.rerouted**2 / 2

    def few(self, numel: int) -> float:
        """Factor on the bound for small tensors, whose gradient may cancel while its terms' rounding does not.

        n elements shrink by a factor f with probability f^n.
        """
        return max(1.0, RARE ** (-1 / numel) / SAFETY) if numel < FEW else 1.0

    @property
    def distance(self) -> float:
        """Largest relative distance of one tensor's gradient at step 1."""
        return SAFETY * self.error

    @cached_property
    def error(self) -> float:
        """Relative error of both runs' gradients, counted."""
        return math.hypot(self.arm.gradient, self.control.gradient)

    def tensor(self, name: str, numel: int) -> float:
        """Largest relative distance of this tensor's gradient at step 1, observed or counted."""
        moved = [self._moved(run, name) for run in (self.arm, self.control)]
        if None in moved:
            return self.few(numel) * self.distance
        return margin(numel, self.draws) * math.hypot(*(each for each in moved if each is not None))

    def _moved(self, run: Arithmetic, name: str) -> float | None:
        if run.compute == "fp64":
            return run.gradient
        found = self.reach.get(run.compute, {}).get(name)
        return None if found is None or run.fp8 else math.hypot(found["distance"], run.reduction)

    def floor(self, name: str) -> float:
        """Distance that reductions alone explain, also of a single element, to tell equal kernels from equal bits.

        Gradients of a parameter used more than once are added in the compute dtype by one engine, in the main
        gradients' by another.
        """
        sums = [run.reduction for run in (self.arm, self.control)]
        if self.arm.reused and re.fullmatch(self.arm.reused, name):
            sums += [RMS * UNIT[run.compute] for run in (self.arm, self.control)]
        return SAFETY * SIGMAS * math.hypot(*sums)

    @property
    def loss(self) -> float:
        """Largest relative difference of the loss at step 1.

        Errors of logits are independent over tokens, and averaged; the loss itself is rounded in fp32 or wider
        (microbatch means, their sum).
        """
        logits = math.hypot(self.arm.forward, self.control.forward) / math.sqrt(self.arm.tokens)
        wide = "fp64" if self.arm.compute == self.control.compute == "fp64" else "fp32"
        return SAFETY * logits + 4 * UNIT[wide]

    def scale(self, standard_error: float, residual: float) -> float:
        """Largest |b| of one tensor in g_arm = (1 + b) g_control + r.

        A pure factor leaves no residual, and rounding always does. So the coherent part of rounding is bounded by the
        residual as well as by `coherent`: two bf16 runs with equal bits but a factor 1 + 1/1024 differ.
        """
        shared = min(self.arm.coherent + self.control.coherent, residual)
        return SIGMAS * standard_error + shared + self._scaling

    def global_scale(self, standard_error: float, residual: float) -> float:
        """Largest pooled b over all tensors, from the spread of the tensors' own."""
        shared = min(self.arm.global_coherent + self.control.global_coherent, residual)
        return SIGMAS * standard_error + shared + self._scaling

    @property
    def _scaling(self) -> float:
        return self.arm.scaling + self.control.scaling

    @property
    def norm(self) -> float:
        """Largest relative difference of the gradient norm at step 1: a scale error, and the second-order share of a
        distance."""
        error = self.distance
        coherent = self.arm.global_coherent + self.control.global_coherent
        return error / math.sqrt(self.arm.tokens) + coherent + self._scaling + error**2 / 2

    @property
    def smallest_fault(self) -> float:
        """Relative size of the smallest structural fault: one of N ranks or k microbatches counted twice, or not."""
        return 1.0 / max(self.arm.ranks, self.control.ranks, self.arm.microbatches, self.control.microbatches, 2)

    @property
    def is_low_precision(self) -> bool:
        """True if a change of a main weight by one unit can flip a compute weight by a much larger one."""
        return any(run.fp8 or run.compute in SIXTEEN_BITS for run in (self.arm, self.control))


def _most(expected: float) -> int:
    """Smallest n that a Poisson count of this mean exceeds less than once in a million."""
    if not expected:
        return 0
    from scipy.special import pdtrik

    return math.ceil(float(pdtrik(1 - 1e-6, expected)))
