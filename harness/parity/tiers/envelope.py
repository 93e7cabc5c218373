"""How far rounding alone can drive two runs apart: T2's bounds, derived from the two configurations.

Nothing here is a tolerance somebody liked. Each bound is made of what either run rounds (`arithmetic`, counted);
docs/verdicts.md gives the derivations at length and the measurements they were checked against.

    reach      where the control is a perturbed reference, each tensor's gradient has a bound of its own, observed
               instead of counted (`Envelope.tensor`, see [Note: Perturbed reference] in harness/probe/rounding.py)

    routes     a router's choice is discontinuous: where rounding swaps two experts of nearly equal score, a token's
               whole contribution moves (`Envelope.flips`). What that explains is in doubt, never fine and never refuted
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING

from harness.config.roundoff import RMS, SIXTEEN_BITS, UNIT, reach_name
from harness.config.schema import ModelFamily
from harness.parity.tiers.arithmetic import RARE, SAFETY, SIGMAS, Arithmetic, margin

if TYPE_CHECKING:
    from harness.parity.record import Record
    from harness.parity.tiers.gradients import TensorPair

FEW = 7
"""Elements from which on SAFETY covers how much smaller than its terms a gradient may happen to be."""


@dataclass(frozen=True)
class Envelope:
    """Bounds by rounding between two runs that start from the same weights and are fed the same tokens."""

    arm: Arithmetic
    control: Arithmetic
    same_forward: bool = False
    """True if the losses of step 1 agree in every bit, as no pair's do in which a token took another route."""
    reach: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """Reach by the perturbed reference: by compute dtype and parameter, how far its roundings move the gradient."""
    draws: int = 0

    @classmethod
    def of(cls, arm: Record, control: Record) -> Envelope:
        known = control if control.moves else arm  # of one model, one batch and the same weights, so whose is no matter
        losses = [run.series("loss")[:1] for run in (arm, control)]
        same = bool(losses[0]) and losses[0] == losses[1]
        left, right = (Arithmetic.of(run.config).observed(known.moves, known.draws) for run in (arm, control))
        return cls(left, right, same, known.moves, known.draws)

    @property
    def is_bounded(self) -> bool:
        """True if anything says how far rounding may drive the two apart: a count of roundings, or a reference."""
        return self.arm.is_bounded and self.control.is_bounded

    @property
    def flips(self) -> int:
        """Most tokens, over all blocks, that rounding sends to another expert at step 1: beaten once in a million.

        Among N scores drawn alike, the last chosen and the first rejected lie within x standard deviations of each
        other with density N * phi(z), z the quantile that K of N exceed. Scores that err by e in the mean square swap
        across a gap with probability e / sqrt(pi) times that density.
        """
        n, k = self.arm.num_experts, self.arm.experts_per_token
        if self.same_forward or k >= n:
            return 0
        density = n * NormalDist().pdf(NormalDist().inv_cdf(1 - k / n))
        error = math.hypot(self.arm.forward, self.control.forward)
        routes = self.arm.tokens * self.arm.layers
        return _most(routes * min(1.0, density * error / math.sqrt(math.pi)))

    @property
    def rerouted(self) -> float:
        """Bound on a tensor's gradient, fed by all tokens, under flips: each takes one token's share out and puts
        another one in. An expert's own gradient they may move by anything, where few tokens feed it."""
        return SAFETY * math.sqrt(2 * self.flips / self.arm.tokens)

    @property
    def rerouted_scale(self) -> float:
        """Bound on the scale of such a gradient under flips: shares of tokens that all point one way."""
        return 2 * self.flips / self.arm.tokens

    @property
    def rerouted_loss(self) -> float:
        """Bound on the loss under flips: the loss of as many tokens as flip, in either direction."""
        return SAFETY * math.sqrt(self.flips) / self.arm.tokens

    @property
    def rerouted_norm(self) -> float:
        """Bound on the gradient's norm under flips, as a distance without direction does."""
        return self.rerouted / math.sqrt(self.arm.tokens) + self.rerouted**2 / 2

    def few(self, numel: int) -> float:
        """How much farther off a tensor of so few elements may lie: a gain's gradient is a sum over all tokens that may
        happen to cancel, while the rounding of its terms does not. n elements shrink by a factor f with probability
        f^n."""
        return max(1.0, RARE ** (-1 / numel) / SAFETY) if numel < FEW else 1.0

    @property
    def distance(self) -> float:
        """Largest relative distance of one tensor's gradient at step 1."""
        return SAFETY * self.error

    @cached_property
    def error(self) -> float:
        """Relative error of both runs' gradients: counted; under FP8 as a perturbed reference shows it, if one does."""
        return math.hypot(*(self._of_fp8(run, "distance", run.gradient) for run in (self.arm, self.control)))

    def _of_fp8(self, run: Arithmetic, key: str, counted: float, name: str = "") -> float:
        """Bound of a run under FP8 by a perturbed reference, its reduction included; else what is counted."""
        found = self.reach.get(reach_name(run.compute, run.fp8), {}).get(name) if run.fp8 else None
        return counted if found is None else math.hypot(found[key], run.reduction)

    def _tilts(self, name: str) -> float:
        """Largest factor that 8-bit operands lend the gradient of a tensor, or of all (""), as shown or counted."""
        return sum(self._of_fp8(run, "scale", run.tilt / SAFETY, name) * SAFETY for run in self._with_fp8)

    @property
    def _with_fp8(self) -> list[Arithmetic]:
        return [run for run in (self.arm, self.control) if run.fp8]

    def tensor(self, name: str, numel: int) -> float:
        """Largest relative distance of this tensor's gradient at step 1: from how far the perturbed reference moves it,
        else from the count."""
        moved = [self._moved(run, name) for run in (self.arm, self.control)]
        if None in moved:
            return self.few(numel) * self.distance
        return margin(numel, self.draws) * math.hypot(*(each for each in moved if each is not None))

    def _moved(self, run: Arithmetic, name: str) -> float | None:
        if run.compute == "fp64":
            return run.gradient
        found = self.reach.get(reach_name(run.compute, run.fp8), {}).get(name)
        return None if found is None else math.hypot(found["distance"], run.reduction)

    def share(self, pair: TensorPair) -> float:
        """How far rounding may move a piece of this tensor, to hold it against pieces of others: one number where
        roundings are counted, as every tensor has as many. The tensors of a model of the user's own are no kin, and how
        far each of them moves was observed."""
        if self.arm.family is not ModelFamily.ext or not self.reach:
            return 1.0
        return self.piece(self.tensor(pair.name, pair.numel), pair.block.stop - pair.block.start)

    def floor(self, name: str) -> float:
        """Distance that reductions alone explain, of a single element too: what tells kernels that agree from equal
        bits.

        The gradients of a parameter that is used more than once are added in the compute dtype by one engine, in the
        main gradients' by another: no kernel need differ for that.
        """
        sums = [run.reduction for run in (self.arm, self.control)]
        if self.arm.reused and re.fullmatch(self.arm.reused, name):
            sums += [RMS * UNIT[run.compute] for run in (self.arm, self.control)]
        return SAFETY * SIGMAS * math.hypot(*sums)

    def piece(self, whole: float, numel: int) -> float:
        """Largest distance of a piece of a tensor that as a whole may lie so far off: over a half of its own mean
        square it may lie sqrt(2) farther, and the mean square of n independent errors scatters by a factor
        1 + sqrt(2 / n) a standard deviation."""
        return math.sqrt(2) * whole * math.sqrt(1 + SIGMAS * math.sqrt(2 / numel))

    @property
    def loss(self) -> float:
        """Largest relative difference of the loss at step 1: the logits' errors, which are independent from token to
        token, averaged over the tokens; and the loss itself, rounded in fp32 or wider (microbatch means, their sum)."""
        tokens = math.sqrt(self.arm.tokens)
        logits = (self._of_fp8(run, "loss", run.forward / tokens) for run in (self.arm, self.control))
        return SAFETY * math.hypot(*logits) + 4 * UNIT[self._wide]

    @property
    def _wide(self) -> str:
        return "fp64" if self.arm.compute == self.control.compute == "fp64" else "fp32"

    def scale(self, standard_error: float, residual: float, name: str) -> float:
        """Largest |b| of one tensor in g_arm = (1 + b) g_control + r.

        A pure factor leaves no residual, and rounding always does. So what rounding may contribute coherently is
        bounded by the residual it left as well as by `coherent`: two bf16 runs with equal bits but a factor
        1 + 1/1024 differ.
        """
        shared = min(self.arm.coherent + self.control.coherent + self._tilts(name), residual)
        return SIGMAS * standard_error + shared + self._scaling

    def global_scale(self, standard_error: float, residual: float) -> float:
        """Largest pooled b over all tensors, from the spread of the tensors' own."""
        shared = min(self.arm.global_coherent + self.control.global_coherent + self._tilts(""), residual)
        return SIGMAS * standard_error + shared + self._scaling

    @property
    def _scaling(self) -> float:
        return self.arm.scaling + self.control.scaling

    @property
    def norm(self) -> float:
        """Largest relative difference of the gradient norm at step 1, by the model alone: a scale error, and the
        second-order share of a distance that has no direction."""
        error = self.distance
        coherent = self.arm.global_coherent + self.control.global_coherent + self._tilts("")
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
    if expected > 100:
        return math.ceil(expected + 5 * math.sqrt(expected))
    count, term = 0, math.exp(-expected)
    below = term
    while 1 - below > 1e-6:
        count += 1
        term *= expected / count
        below += term
    return count
